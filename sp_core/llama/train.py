"""One step of training a LLaMA over a mesh, on sequences of any lengths; and checkpoints of it.

Each replica packs its sequences into one row, without padding. Then:

    loss -> backward -> reduce -> clip -> optimizer

The folder of a checkpoint is that of the model, as `save` writes it, with two more entries:

    optimizer/model.safetensors    tensors of the optimizer as large as their parameters, whole
    training.json                  all else: step, numbers, names of parameters, random state
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.agreement import make_alike
from sp_core.errors import CheckpointError, CollectiveMismatch
from sp_core.llama.checkpoint import DTYPES, STATE, Beside, Checkpoint, check_names, parts_of, write
from sp_core.llama.config import read_json
from sp_core.llama.model import Llama, Tokens, check_model, flat
from sp_core.mask import Mask
from sp_core.nn.gradients import clip_gradient_norm, reduce_gradients
from sp_core.nn.loss import next_token_labels
from sp_core.segments import split_ranges
from sp_core.sharding import Sharding

RECORD = "training.json"
Scheduler = torch.optim.lr_scheduler.LRScheduler
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
    own: bool = False,
    recompute: bool = False,
) -> Step:
    """Train the weights for one step on the next tokens of these sequences.

    Args:
        model: on any mesh.
        optimizer: of `model.parameters()`; one that treats each element by itself, as AdamW and SGD
            do, for weights are split.
        sequences: as in `backward`.
        max_norm: to which the norm of all gradients together is clipped; infinity for no clipping.
        layout, own, recompute: as in `backward`.

    Communication:
        That of `backward` and of `clip_gradient_norm`.

    Raises:
        ValueError: as `backward` and `clip_gradient_norm`; the weights are then what they were. On
            every rank.
    """
    call = f"train_step({max_norm=})"
    loss = _backward(call, model, sequences, layout, own, recompute, optimizer=optimizer)
    norm = clip_gradient_norm(model.parameters(), max_norm, tensor=model.grid.tensor)
    optimizer.step()
    return Step(loss, norm)


def backward(
    model: Llama,
    sequences: Tokens,
    *,
    layout: Layout = Sharding.zigzag,
    own: bool = False,
    recompute: bool = False,
) -> float:
    """Set the gradient of each weight, on every rank, to that of the mean loss over all sequences.

    Args:
        model: on any mesh.
        sequences: tokens, at least one in each; the same ones on every rank. Replicas take shares
            of them.
        layout: how a replica's tokens are dealt to its sequence ranks.
        own: whether the sequences are those of this replica only, which other replicas need not
            know. They are the same ones on all ranks of the replica.
        recompute: whether each layer keeps its input only, (B, S/P, E), and is computed once more
            in the backward pass, for long sequences. Loss and gradients are the same numbers.

    Returns:
        The loss: mean over all tokens that have a next one in their sequence.

    Communication:
        One agreement; that of the model and of `next_token_loss` forward and
        backward, of `next_token_labels`, and of `reduce_gradients`. With `recompute` that of the
        layers forward twice.

    Raises:
        ShapeError, ValueError: an empty sequence, a token that is not in the vocabulary, or no
            token with a next one.
        CollectiveMismatch: ranks with different sequences. All on every rank.
    """
    return _backward("backward()", model, sequences, layout, own, recompute)


def _backward(
    call: str,
    model: Llama,
    sequences: Tokens,
    layout: Layout,
    own: bool,
    recompute: bool,
    **others: object,
) -> float:
    """Carry out `backward`, as part of a call that has other arguments to check."""
    check_model(model)
    grid, dealt, given = model.grid, list[Sharding](), list[str]()
    count, place = (1, 0) if own is True else (model.grid.replicas.size, model.grid.replicas.rank)

    def check() -> int:
        arguments.check(sequences=sequences, layout=layout, own=own, recompute=recompute, **others)
        dealt.extend(_dealt(sequences, layout, count, grid.sequence.size))
        deal = [sharding.fingerprint for sharding in dealt]
        given.append(f"{list(map(list, sequences))} dealt as {deal}")
        digest = blake2b(given[0].encode(), digest_size=4).digest()
        return grid.replicas.rank << 32 | int.from_bytes(digest, "little")

    seen = grid.everyone.agree_on(
        lambda: f"{call} of {'own' if own else given[0]}, {recompute=}", check
    )
    if len(set(seen)) > grid.replicas.size:
        raise CollectiveMismatch(
            f"{call} was given other sequences or layouts on ranks of one replica. Give own "
            "sequences to all ranks of a replica alike."
        )
    share = split_ranges(len(sequences), count)[place]
    row, mask = packed([sequences[number] for number in share])
    sharding = dealt[place]
    tokens = sharding.shard(row, grid.sequence.rank, 1).to(grid.everyone.device)
    model.zero_grad()
    one = replace(model.begin(tokens, sharding, mask), recompute=recompute)
    labels = next_token_labels(tokens, comm=grid.sequence, sharding=sharding, mask=mask)
    loss = model.loss(model.hidden(tokens, one), labels, one.lengths)
    loss.backward()
    reduce_gradients(model.parameters(), data=grid.data, tensor=grid.tensor)
    return float(loss.detach())


def _dealt(sequences: Tokens, layout: Layout, replicas: int, ranks: int) -> list[Sharding]:
    """Deal the tokens of each replica to its sequence ranks."""
    for number, sequence in enumerate(sequences):
        if not sequence:
            raise ValueError(
                f"sequence {number} is empty; leave it out, or give it at least one token."
            )
    dealt = []
    for share in split_ranges(len(sequences), replicas):
        dealt.append(layout(sum(len(sequences[number]) for number in share), ranks))
        remedy = "Pass a function that makes one, such as Sharding.zigzag."
        arguments.check_type("a layout's result", dealt[-1], Sharding, remedy)
    return dealt


def packed(sequences: Tokens) -> tuple[Tensor, Mask]:
    """Put sequences one after the other in a row (1, S).

    Return it with the mask under which none sees another.
    """
    return flat(sequences).unsqueeze(0), Mask(
        causal=True, documents=(0, *accumulate(map(len, sequences))) if sequences else None
    )


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
    """Write all that a training needs to go on: weights, optimizer, schedule and random state.

    As with `save` the folder gets its name when everything is in it. A save that is killed leaves
    the checkpoints before it as they are. `load` and transformers read the model in the folder.

    Args:
        model: on any mesh without stages.
        folder: where nothing is yet, or an empty folder; a new one for each checkpoint.
        optimizer: of parameters of the model. It holds numbers, and floating tensors as large as
            their parameters.
        step: how many steps were done; `load_training` returns it.
        scheduler: of the learning rate, if there is one.
        generator: of the random numbers that order the data, if there is one, in the same state on
            every rank. The library has no random state: `dropout` computes with a seed.
        max_file_bytes: as in `save`, of the weights and of the tensors of the optimizer.

    Communication:
        Over the tensor ranks one all-gather of each weight and of each tensor of the optimizer;
        over all ranks three agreements, and one for each file.

    Raises:
        CheckpointError: as `save`; or parameters of another model, or a state that cannot be
            written as tensors and JSON.
        CollectiveMismatch: ranks with another optimizer, schedule or random state. Both on every
            rank.
    """

    def beside() -> Beside:
        arguments.check(step=step)
        record = {"step": step, **_record(model, optimizer, scheduler, generator)}
        tensors = {
            f"{name}.{kind}": (x, placement)
            for name, (weight, placement) in parts_of(model).items()
            for kind, x in optimizer.state.get(weight, {}).items()
            if _is_cut(x, weight)
        }
        text = json.dumps(record, default=_refuse)
        return f"save_training({_digests(record)})", tensors, {RECORD: text}

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

    Each rank reads its own slices, on any mesh without stages. If the folder is refused, nothing
    was changed.

    Args:
        model: of the same architecture and dtype.
        folder: that `save_training` has written.
        optimizer: of the same class, with the same parameters in the same groups. Its learning rate
            and the like are set, too.
        scheduler: of the same class, if there was one.
        generator: if there was one.

    Returns:
        How many steps were done.

    Communication:
        One agreement, after everything has been read.

    Raises:
        CheckpointError: a folder that is broken, or of another model or training.
        CollectiveMismatch: ranks that see different folders. Both on every rank.
    """
    check_model(model)

    def read() -> tuple[tuple[Any, ...], str]:
        arguments.check(folder=folder)
        now, place = _record(model, optimizer, scheduler, generator)["of"], Path(folder)
        record = read_json(place / RECORD, object_pairs_hook=_keyed)
        then, weights = record.get("of", {}), Checkpoint(folder)
        wrong = [
            f"{name} {then.get(name)!r:.300}, now {x!r:.300}"
            for name, x in json.loads(json.dumps(now)).items()
            if then.get(name) != x
        ]
        if wrong:
            raise CheckpointError(
                f"{folder} is of another training: {'; '.join(wrong)}. Make model, optimizer, "
                "scheduler and generator as they were then."
            )
        check_names(weights, model)
        text = f"load_training({_digests(record)}, {weights.fingerprint()})"
        return (record, *_read(model, weights, record)), text

    record, values, state = make_alike(model.grid.everyone, read)
    if generator is not None:  # first, for it may be refused
        generator.set_state(torch.tensor([*bytes.fromhex(record["random"])], dtype=torch.uint8))
    model.fill(lambda name, _: values[name])
    optimizer.load_state_dict({"state": state, "param_groups": record["groups"]})
    if scheduler is not None:
        scheduler.load_state_dict(record["schedule"])
    return int(record["step"])


def _record(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    generator: torch.Generator | None,
) -> dict[str, Any]:
    """Describe a training but for large tensors. Its entry "of" has to be the same again."""
    remedy = "Make one of model.parameters()."
    arguments.check_type("optimizer", optimizer, torch.optim.Optimizer, remedy)
    arguments.check(scheduler=scheduler, generator=generator)
    names = {weight: name for name, (weight, _) in parts_of(model).items()}
    groups = [[names.get(x) for x in group["params"]] for group in optimizer.param_groups]
    if any(None in group for group in groups):
        raise CheckpointError(f"the optimizer has parameters that the model lacks. {remedy}")
    kinds = {
        "dtype": str(model.dtype),
        "optimizer": type(optimizer).__name__,
        "parameters": groups,
        "scheduler": scheduler and type(scheduler).__name__,
        "generator": generator and generator.device.type,
    }
    state: dict[str, dict[str, Any]] = {
        names[weight]: {
            kind: {}
            if _is_cut(x, weight)
            else [x.item()]
            if isinstance(x, Tensor) and not x.dim()
            else x
            for kind, x in held.items()
        }
        for weight, held in optimizer.state.items()
    }
    return {
        "of": model.config.to_dict() | kinds,
        "groups": optimizer.state_dict()["param_groups"],
        "state": state,
        "schedule": scheduler and scheduler.state_dict(),
        "random": bytes(generator.get_state().tolist()).hex() if generator else "",
    }


def _is_cut(x: object, weight: Tensor) -> bool:
    """Return whether something that an optimizer holds is cut over ranks as its parameter."""
    return isinstance(x, Tensor) and x.shape == weight.shape and x.dtype in DTYPES.values()


def _read(
    model: Llama, weights: Checkpoint, record: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    """Read this rank's weights by name, and the optimizer's state by number of the parameter."""
    placements = {name: placement for name, (_, placement) in parts_of(model).items()}
    rank, held = model.grid.tensor.rank, record["state"]
    is_cut = any(x == {} for kinds in held.values() for x in kinds.values())
    moments = Checkpoint(weights.folder / STATE) if is_cut else weights

    def value(name: str, kind: str, x: Any) -> Any:
        if x == {}:
            return moments.read(f"{name}.{kind}", placements[name], rank)
        return torch.tensor(x[0]) if isinstance(x, list) else x

    state = {
        number: {kind: value(name, kind, x) for kind, x in held[name].items()}
        for number, name in enumerate(chain.from_iterable(record["of"]["parameters"]))
        if name in held
    }
    return {name: weights.read(name, one, rank) for name, one in placements.items()}, state


def _keyed(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    """Make keys that are numbers, such as the milestones of a scheduler, numbers again."""
    return {int(key) if key.isdecimal() else key: value for key, value in pairs}


def _digests(record: dict[str, Any]) -> str:
    """Return a short text that tells trainings apart, entry by entry."""
    texts = {key: json.dumps(x, default=_refuse).encode() for key, x in record.items()}
    return ", ".join(f"{key} #{blake2b(x, digest_size=4).hexdigest()}" for key, x in texts.items())


def _refuse(x: object) -> None:
    """Refuse what is neither a large tensor nor JSON."""
    what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
    raise CheckpointError(
        f"the optimizer or the scheduler holds {what}. Saved are numbers, texts, lists, and "
        "floating tensors of the shape of their parameter. Use others, such as AdamW."
    )
