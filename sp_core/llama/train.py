"""Train a LLaMA over a mesh on sequences of any lengths, and save and load a training.

`backward` sets the gradients; `train_step` also clips them and calls the optimizer. Each replica
(ranks along the axis "dp") puts its sequences one after the other into one row, without padding.

`save_training` writes the model as `save` does, with two more entries, for `load_training`:

    optimizer/model.safetensors    tensors of the optimizer as large as their parameters, whole
    training.json                  all else: step, numbers, names of parameters, random state
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.agreement import make_alike
from sp_core.errors import CollectiveMismatch, ShapeError
from sp_core.llama.checkpoint import Beside, parts_of, write
from sp_core.llama.config import Tokens, check_sequences, flat, read_json
from sp_core.llama.grid import Grid, check_unstaged
from sp_core.llama.model import Llama, check_model
from sp_core.llama.record import (
    Scheduler,
    check_optimizer,
    check_record,
    digests,
    is_cut,
    keyed,
    load_optimizer,
    read_parts,
    record_of,
    refuse,
    restored,
    settings_of,
)
from sp_core.mask import Mask
from sp_core.nn.gradients import clip_gradient_norm, reduce_gradients
from sp_core.nn.loss import next_token_labels
from sp_core.nn.memory import Saving
from sp_core.nn.replicated import learning
from sp_core.sharding import Sharding, split_ranges

RECORD = "training.json"
Layout = Callable[[int, int], Sharding]
"""A function from the numbers of tokens and of ranks to a sharding, such as `Sharding.zigzag`."""


@dataclass(frozen=True)
class Step:
    """The loss and the norm of the gradients of a training step.

    Args:
        loss: mean over all tokens that have a next token in their sequence, before the step.
        norm: the 2-norm of all gradients together, before clipping.
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
    own: bool = False,
    window: int | None = None,
    recompute: bool = False,
    offload: bool = False,
    chunk: int | None = None,
) -> Step:
    """Train the weights for one step, to predict each next token. Every rank calls this.

    Args:
        model: a model on any mesh without the axis "pp".
        optimizer: an optimizer of `model.parameters()` that updates each element independently of
            the others, as AdamW and SGD do, because tensor ranks hold only parts of the weights.
            With whole weights (without "tp") any other whose `step()` needs no closure.
        sequences, layout, own, window, recompute, offload, chunk: as in `backward`.
        max_norm: the norm of all gradients together is clipped to this; infinity for no clipping.

    Returns:
        The loss before the step, and the norm of all gradients together before clipping.

    Communication:
        As `backward`, then as `clip_gradient_norm`.

    Raises:
        ShapeError, ValueError, TypeError, DtypeError, CollectiveMismatch: as `backward` and
            `clip_gradient_norm`.
        TypeError: the optimizer is a scheduler, or an `LBFGS`, which needs a closure.
        ValueError: the optimizer has parameters that the model lacks, or it is an `Adafactor` or a
            `Muon` of weights that are split over tensor ranks. Of other classes than torch's it is
            not known whether they update each element independently.
        CollectiveMismatch: the optimizers differ in class, settings or weights.

    Every error is raised on every rank, but that of a wrong `model` on this rank. None changes the
    weights.
    """
    saving = Saving(recompute=recompute, offload=offload, chunk=chunk)
    max_norm = arguments.plain(max_norm)
    dealt = _agree(
        lambda: f"train_step({max_norm=}, {settings_of(optimizer, model)})",
        *(model, sequences, layout, own, window, saving),
        optimizer=optimizer,
    )
    loss = _backward(model, saving, *dealt)
    norm = clip_gradient_norm(model.parameters(), max_norm, tensor=model.grid.tensor)
    optimizer.step()
    return Step(loss, norm)


def backward(
    model: Llama,
    sequences: Tokens,
    *,
    layout: Layout = Sharding.zigzag,
    own: bool = False,
    window: int | None = None,
    recompute: bool = False,
    offload: bool = False,
    chunk: int | None = None,
) -> float:
    """Set the gradient of each weight, on every rank, to that of the mean loss over all tokens.

    Every rank calls this. Gradients from before are discarded. Use an optimizer as in `train_step`.

    Args:
        model: a model on any mesh without the axis "pp".
        sequences: for each sequence its tokens, at least one; equal on every rank. Each replica
            (ranks along the axis "dp") takes a part of the sequences.
        layout: a function from the numbers of tokens and ranks to the `Sharding` of a replica's
            tokens over its sequence ranks.
        own: whether the sequences are those of this replica only. Own sequences need to be equal
            only on the ranks of the replica.
        window: how many tokens of its sequence a token sees: itself and those just before it. None
            for all up to itself. The model does not keep the window: `generate` uses none.
        recompute: whether each layer keeps only its input (B, S/P, E), and is computed once more in
            the backward pass, for long sequences. Loss and gradients are the same numbers. A layer
            of which a part was replaced by one with buffers keeps its activations.
        offload: as `recompute`, and the inputs of layers wait in host memory. If the model is on a
            CPU they stay where they are.
        chunk: how many tokens of a rank the feed-forward takes at a time; None for all. Backward
            computes each chunk again, so that the features of only one chunk exist at a time. Each
            chunk adds to the gradients of the weights, in their dtype.

    Returns:
        The loss: mean over all tokens that have a next token in their sequence.

    Communication:
        One agreement (32-byte all-reduce; with several replicas also 64 bytes of each rank). As
        `Llama.forward`, `next_token_loss` and their backward, `next_token_labels` and
        `reduce_gradients`. With `recompute` or `offload` the layers repeat their forward messages
        in backward; with `chunk` the feed-forward does so too, and sends a message per chunk.

    Raises:
        ShapeError, ValueError, TypeError: an empty sequence, a token that is not in the vocabulary,
            no token with a next token, no weight to train, a layout for other numbers of tokens or
            ranks, `window` or `chunk` below 1, or layers that are split over stages.
        DtypeError: a model of several dtypes, or of a half type under autocast to another.
        CollectiveMismatch: ranks with different sequences, frozen weights or autocast.

    All are raised on every rank, but that of a wrong `model` on this rank.
    """
    saving = Saving(recompute=recompute, offload=offload, chunk=chunk)
    dealt = _agree(lambda: "backward()", model, sequences, layout, own, window, saving)
    return _backward(model, saving, *dealt)


def _backward(model: Llama, saving: Saving, row: Tensor, mask: Mask, sharding: Sharding) -> float:
    """Do what `backward` does, with a replica's row, mask and sharding from `_agree`."""
    grid = model.grid
    tokens = sharding.shard(row, grid.sequence.rank, 1).to(grid.everyone.device)
    model.zero_grad()
    one = model.begin(tokens, sharding, mask, saving, compare=False)
    labels = next_token_labels(tokens, comm=grid.sequence, sharding=sharding, mask=mask)
    loss = model.loss(model.hidden(tokens, one), labels, one.lengths)
    loss.backward()
    reduce_gradients(model.parameters(), data=grid.data, tensor=grid.tensor)
    return float(loss.detach())


def _agree(
    call: Callable[[], str],
    model: Llama,
    sequences: Tokens,
    layout: Layout,
    own: bool,
    window: int | None,
    saving: Saving,
    **others: object,
) -> tuple[Tensor, Mask, Sharding]:
    """Check the arguments of `backward`, and `others`, on all ranks.

    `call` names the caller in errors. Return row, mask and sharding of this rank's replica.
    """
    check_model(model)
    grid, replicas, given = model.grid, model.grid.replicas, list[Any]()

    def check() -> int:
        arguments.check(sequences=sequences, layout=layout, own=own, **others)
        if others:
            check_optimizer(others["optimizer"], model)
        check_sequences(sequences, model.config)
        saving.check()
        _check_weights(model)
        shares = split_ranges(len(sequences), 1 if own else replicas.size)
        given.extend(_dealt(sequences, layout, window, shares, grid))
        digest = crc32(f"{replicas.rank} {given[0]}".encode())
        return digest if any(len(tokens) > 1 for tokens in sequences) else ~digest  # below 0

    def said() -> str:
        what = f"{call()} of {'own' if own else given[0]}, window={given[2].window}, {saving}"
        return f"{what}, {model.precision}, {learning(model)}"

    seen = grid.everyone.agree_on(said, check)
    if len(set(seen)) > replicas.size:
        raise CollectiveMismatch(
            f"{call()}: ranks of one replica have other sequences or layouts. Pass them alike."
        )
    if max(seen) < 0:
        raise ValueError(
            "no rank was given a sequence of two tokens or more, so there is no next token to "
            "learn. Pass at least one such sequence."
        )
    return given[1], given[2], given[3]


def _check_weights(model: Llama) -> None:
    """Raise an error, on this rank, for stages, replaced parts, or if nothing gets a gradient."""
    model.grid.check_one_stage()
    model.check_parts()
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in model.parameters())):
        raise ValueError(
            "no weight of the model has requires_grad=True, or gradients are off. Set it for the "
            "weights to train, and call this outside torch.no_grad()."
        )


def _dealt(
    sequences: Tokens, layout: Layout, window: int | None, shares: Sequence[range], grid: Grid
) -> tuple[str, Tensor, Mask, Sharding]:
    """Divide each share of the sequences over ranks by `layout`. Return text that describes all.

    Then return row, mask and sharding of one share: that of this rank's replica, or the only one.
    """
    dealt, remedy = [], "Pass a function that makes one, such as Sharding.zigzag."
    for share in shares:
        sizes = sum(len(sequences[number]) for number in share), grid.sequence.size
        made = layout(*sizes)
        arguments.check_type("a layout's result", made, Sharding, remedy)
        if (made.seq_len, made.size) != sizes:
            raise ShapeError(
                f"a layout's result for {made.seq_len} tokens over {made.size} ranks was made; one "
                f"for {sizes[0]} tokens over {sizes[1]} ranks is needed. {remedy}"
            )
        dealt.append(made)
    place = grid.replicas.rank % len(shares)
    text = f"{list(map(list, sequences))} dealt as {[sharding.fingerprint for sharding in dealt]}"
    return text, *packed([sequences[number] for number in shares[place]], window), dealt[place]


def packed(sequences: Tokens, window: int | None = None) -> tuple[Tensor, Mask]:
    """Return the sequences in one row, int64 (1, S), and a causal mask with each as a document.

    With `window` a token sees that many tokens of its document: itself and those before it.
    """
    ends = (0, *accumulate(map(len, sequences)))
    return flat(sequences).unsqueeze(0), Mask(causal=True, window=window, documents=ends)


def save_training(
    model: Llama,
    folder: str | Path,
    *,
    optimizer: torch.optim.Optimizer,
    step: int,
    scheduler: Scheduler | None = None,
    generator: torch.Generator | None = None,
    max_file_bytes: int | None = None,
) -> None:
    """Write what is needed to resume training: weights, optimizer, scheduler, generator.

    Every rank calls this; rank 0 writes. As with `save`, files go into a temporary folder, and move
    when complete. So a save that is killed leaves earlier checkpoints intact. `load` and
    transformers read the model in the folder, unless parts were removed, added, wrapped, pruned or
    parametrized. Buffers, such as the masks of torch.nn.utils.prune, are not written.

    Args:
        model: a model on any mesh without the axis "pp".
        folder: a path that does not exist yet, or an empty folder; another one for each checkpoint.
        optimizer: an optimizer of the model's parameters, as in `train_step`. Its state may have
            numbers, texts, lists, dicts with texts as keys, tensors of no dims, and floating-point
            tensors of the shape of the parameter. Dtypes are kept.
        step: how many steps were done; `load_training` returns this number.
        scheduler: the scheduler of the learning rate, if there is one. Keys in its state, such as
            milestones, are Python's numbers or texts, but no texts of numbers.
        generator: the `torch.Generator` that shuffles the data, if there is one, in the same state
            on every rank. The state of torch's default generator is not written, and not needed:
            `dropout` takes a seed.
        max_file_bytes: as in `save`, for weights and for tensors of the optimizer.

    Communication:
        Over the tensor ranks, one all-gather of each weight and of each tensor of the optimizer.
        Over all ranks, three agreements (32-byte all-reduces), and one more for each file of
        tensors.

    Raises:
        CheckpointError: as `save`, but not for the model's parts; or the optimizer has parameters
            of another model, needs whole weights, or has a state that cannot be written as tensors
            and JSON.
        ValueError: a step below 0.
        CollectiveMismatch: ranks with different optimizers or random states.

    Every error is raised on every rank, but that of a wrong `model` on this rank.
    """

    def beside() -> Beside:
        arguments.check(step=step)
        record = {"step": int(step), **record_of(model, optimizer, scheduler, generator)}
        tensors = {
            f"{name}.{kind}": (x, placement)
            for name, (weight, placement) in parts_of(model).items()
            for kind, x in optimizer.state.get(weight, {}).items()
            if is_cut(x, weight)
        }
        text = json.dumps(record, default=partial(refuse, record))
        return f"save_training({digests(record)})", tensors, {RECORD: text}

    write(model, folder, max_file_bytes, beside)


def load_training(
    model: Llama,
    folder: str | Path,
    *,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None = None,
    generator: torch.Generator | None = None,
) -> int:
    """Set model, optimizer, scheduler and generator to what `save_training` has written.

    Every rank calls this, and reads its own parts of the tensors. The mesh may differ from the one
    of the save. If the folder is refused, nothing is changed.

    Args:
        model: a model of the same architecture and dtype, on any mesh without the axis "pp".
        folder: a folder that `save_training` has written.
        optimizer: an optimizer of the same class, with the same parameters in the same groups.
            Hyperparameters such as the learning rate are set, too.
        scheduler: a scheduler of the same class, if one was saved; else None.
        generator: a generator on the same type of device, if one was saved; else None.

    Returns:
        How many steps were done.

    Communication:
        One agreement (32-byte all-reduce), after all ranks have read their parts.

    Raises:
        CheckpointError: a folder in which a file is missing, cut short or of another format, or a
            folder of a different model or training; or the layers are split over stages. Values of
            tensors are not checked.
        CollectiveMismatch: ranks that see different folders. Both on every rank.
    """
    check_model(model)

    def read() -> tuple[tuple[Any, ...], str]:
        check_unstaged(model.grid)
        arguments.check(folder=folder)
        now, path = record_of(model, optimizer, scheduler, generator), Path(folder) / RECORD
        record = read_json(path)
        check_record(path, record, now)
        record = restored(keyed(record), now)
        weights, *parts = read_parts(path, record, model, optimizer, generator)
        return (record, *parts), f"load_training({digests(record)}, {weights})"

    record, values, state, random = make_alike(model.grid.everyone, read)
    if scheduler is not None:  # first, because it alone was not tried
        scheduler.load_state_dict(record["schedule"])
    if generator is not None:
        generator.set_state(random)
    model.fill(lambda name, _: values[name])
    load_optimizer(optimizer, state)
    return int(record["step"])
