"""One step of training a LLaMA over a mesh, on sequences of any lengths.

each replica packs its sequences into one row, without padding    loss -> backward -> reduce -> clip
-> optimizer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.llama.model import Llama, Tokens, check_model, flat
from sp_core.mask import Mask
from sp_core.nn.gradients import clip_gradient_norm, reduce_gradients
from sp_core.nn.loss import next_token_labels
from sp_core.segments import split_ranges
from sp_core.sharding import Sharding

Layout = Callable[[int, int], Sharding]
"""The sharding of a number of tokens over a number of ranks."""


@dataclass(frozen=True)
class Step:
    """The loss and the norm of the gradients of a step.

    Args:
        loss: mean over the tokens of all sequences that have a next one, before the step.
        norm: of all gradients together, before clipping.
    """

    loss: float
    norm: float


def train_step(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    sequences: Tokens,
    *,
    max_norm: float,
    layout: Layout = Sharding.zigzag,
) -> Step:
    """Train the weights for one step on the next tokens of these sequences.

    Args:
        model: on any mesh.
        optimizer: of `model.parameters()`; one that treats each element by itself, as AdamW and SGD
            do, for weights are split.
        sequences: as in `backward`.
        max_norm: to which the norm of all gradients together is clipped; infinity for no clipping.
        layout: as in `backward`.

    Communication:
        That of `backward` and of `clip_gradient_norm`.

    Raises:
        ValueError: as `backward` and `clip_gradient_norm`; the weights are then what they were. On
            every rank.
    """
    loss = _backward(f"train_step({max_norm=})", model, sequences, layout, optimizer=optimizer)
    norm = clip_gradient_norm(model.parameters(), max_norm, tensor=model.grid.tensor)
    optimizer.step()
    return Step(loss, norm)


def backward(model: Llama, sequences: Tokens, *, layout: Layout = Sharding.zigzag) -> float:
    """Set the gradient of each weight, on every rank, to that of the mean loss over all sequences.

    Args:
        model: on any mesh.
        sequences: tokens, at least one in each; the same ones on every rank. Replicas take shares
            of them.
        layout: how a replica's tokens are dealt to its sequence ranks.

    Returns:
        The loss: mean over all tokens that have a next one in their sequence.

    Communication:
        One agreement; that of the model and of `next_token_loss` forward and backward, of
        `next_token_labels`, and of `reduce_gradients`.

    Raises:
        ShapeError, ValueError: an empty sequence, a token that is not in the vocabulary, or no
            token with a next one.
        CollectiveMismatch: ranks with different sequences. All on every rank.
    """
    return _backward("backward()", model, sequences, layout)


def _backward(
    call: str, model: Llama, sequences: Tokens, layout: Layout, **others: object
) -> float:
    """Carry out `backward`, as part of a call that has other arguments to check."""
    check_model(model)
    grid, dealt = model.grid, list[Sharding]()

    def text() -> str:
        arguments.check(sequences=sequences, layout=layout, **others)
        for number, sequence in enumerate(sequences):
            if not sequence:
                raise ValueError(
                    f"sequence {number} is empty; leave it out, or give it at least one token."
                )
        for share in split_ranges(len(sequences), grid.replicas.size):
            dealt.append(
                layout(sum(len(sequences[number]) for number in share), grid.sequence.size)
            )
            arguments.check_type(
                "a layout's result",
                dealt[-1],
                Sharding,
                "Pass a function that makes one, such as Sharding.zigzag.",
            )
        return (
            f"{call} of {list(map(list, sequences))} dealt as "
            f"{[sharding.fingerprint for sharding in dealt]}"
        )

    grid.everyone.agree_on(text)
    share = split_ranges(len(sequences), grid.replicas.size)[grid.replicas.rank]
    row, mask = packed([sequences[number] for number in share])
    sharding = dealt[grid.replicas.rank]
    tokens = sharding.shard(row, grid.sequence.rank, 1).to(grid.everyone.device)
    model.zero_grad()
    one = model.begin(tokens, sharding, mask)
    labels = next_token_labels(tokens, comm=grid.sequence, sharding=sharding, mask=mask)
    loss = model.loss(model.hidden(tokens, one), labels, one.lengths)
    loss.backward()
    reduce_gradients(model.parameters(), data=grid.data, tensor=grid.tensor)
    return float(loss.detach())


def packed(sequences: Tokens) -> tuple[Tensor, Mask]:
    """Put sequences one after the other in a row (1, S).

    Return it with the mask under which none sees another.
    """
    return flat(sequences).unsqueeze(0), Mask(
        causal=True, documents=(0, *accumulate(map(len, sequences))) if sequences else None
    )
