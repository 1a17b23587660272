"""Train a LLaMA over a mesh on sequences of any lengths, and save and load a training.

`backward` sets the gradients; `train_step` also clips them and calls the optimizer. Each replica
(ranks along the axis "dp") puts its sequences one after the other into one row, without padding.

`save_training` writes the model as `save` does, with two more entries, for `load_training`:

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
    recompute: bool = False,
) -> Step:
    """Train the weights for one step on the next tokens of these sequences. Every rank calls this.

    Args:
        model: on any mesh without the axis "pp".
        optimizer: of `model.parameters()`, one that treats each element by itself, as AdamW and
            SGD do, because a rank holds only parts of the weights.
        sequences, layout, own, recompute: as in `backward`.
        max_norm: the norm of all gradients together is clipped to this; infinity for no clipping.

    Returns:
        The loss and the norm of the gradients before the step.

    Communication:
        As `backward`, then as `clip_gradient_norm`.

    Raises:
        ShapeError, ValueError, TypeError, CollectiveMismatch: as `backward` and
            `clip_gradient_norm`, on every rank. The weights are then unchanged.
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

    Every rank calls this. Gradients from before are discarded.

    Args:
        model: on any mesh without the axis "pp".
        sequences: for each the tokens, at least one; equal on every rank. Each replica (ranks along
            the axis "dp") takes a part of the sequences.
        layout: a function from the numbers of tokens and ranks to the `Sharding` of a replica's
            tokens over its sequence ranks.
        own: whether the sequences are those of this replica only. Own sequences need to be equal
            only on the ranks of the replica.
        recompute: whether each layer keeps only its input (B, S/P, E), and is computed once more in
            the backward pass, for long sequences. Loss and gradients are the same numbers.

    Returns:
        The loss: mean over all tokens that have a next token in their sequence.

    Communication:
        One agreement (32-byte all-reduce; with several replicas also 64 bytes of each rank). As
        `Llama.forward`, `next_token_loss` and their backward, `next_token_labels` and
        `reduce_gradients`. With `recompute` the layers repeat their forward messages in backward.

    Raises:
        ShapeError, ValueError, TypeError: an empty sequence, a token that is not in the vocabulary,
            no token with a next token, or layers that are split over stages.
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
    """Do what `backward` does, for the function named `call`; also check its arguments `others`."""
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
    """Return for each replica the sharding, by `layout`, of the tokens of all its sequences."""
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
    """Return the sequences in one row, int64 (1, S), and a causal mask with each as a document."""
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

    Every rank calls this; rank 0 writes. As with `save`, a temporary folder is renamed when it is
    complete, so a killed save harms no earlier checkpoint. `load` and transformers read the model
    in the folder.

    Args:
        model: on any mesh without the axis "pp".
        folder: a path where nothing is yet, or an empty folder; a new one for each checkpoint.
        optimizer: of parameters of the model, with a state of numbers, texts, lists, and floating
            tensors as large as their parameters.
        step: how many steps were done; `load_training` returns this number.
        scheduler: of the learning rate, if there is one.
        generator: of the random numbers that order the data, if there is one, in the same state on
            every rank. The library has no random state: `dropout` computes with a seed.
        max_file_bytes: as in `save`, for weights and for tensors of the optimizer.

    Communication:
        Over the tensor ranks one all-gather of each weight and of each tensor of the optimizer.
        Over all ranks three agreements (32-byte all-reduces), and one for each file of tensors.

    Raises:
        CheckpointError: as `save`; or parameters of another model, or a state that cannot be
            written as tensors and JSON.
        CollectiveMismatch: ranks with other optimizers or random states. Both on every rank.
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

    Every rank calls this, and reads its own parts of the tensors. The mesh may differ from the one
    of the save. If the folder is refused, nothing is changed.

    Args:
        model: of the same architecture and dtype, on any mesh without the axis "pp".
        folder: a folder that `save_training` has written.
        optimizer: of the same class, with the same parameters in the same groups. Hyperparameters
            such as the learning rate are set, too.
        scheduler: of the same class, if one was saved; else None.
        generator: on the same type of device, if one was saved; else None.

    Returns:
        How many steps were done.

    Communication:
        One agreement (32-byte all-reduce), after all ranks have read their parts.

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
    if generator is not None:  # first, because set_state may raise an error
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
    """Return the contents of `training.json` without the step; all state except large tensors.

    Entries: "of", the kinds of model, optimizer, scheduler and generator, which have to be equal in
    `load_training`; "groups" of parameters; "state" of the optimizer by name of parameter, with {}
    for a large tensor and [x] for a tensor of one number x; "schedule"; "random", as hexadecimal.
    """
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
    """Return whether `x` of an optimizer's state is a floating tensor of the shape of `weight`."""
    return isinstance(x, Tensor) and x.shape == weight.shape and x.dtype in DTYPES.values()


def _read(
    model: Llama, weights: Checkpoint, record: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    """Read this rank's parts of weights, by name, and of optimizer state, by parameter number."""
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
    """Return a JSON object as a dict. Keys that are numbers, such as milestones, become ints."""
    return {int(key) if key.isdecimal() else key: value for key, value in pairs}


def _digests(record: dict[str, Any]) -> str:
    """Return a text with a short hash of each entry of a record, to compare over ranks."""
    texts = {key: json.dumps(x, default=_refuse).encode() for key, x in record.items()}
    return ", ".join(f"{key} #{blake2b(x, digest_size=4).hexdigest()}" for key, x in texts.items())


def _refuse(x: object) -> None:
    """Raise CheckpointError for a value that JSON cannot hold; `json.dumps` calls this."""
    what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
    raise CheckpointError(
        f"the optimizer or the scheduler holds {what}. Saved are numbers, texts, lists, and "
        "floating tensors of the shape of their parameter. Use others, such as AdamW."
    )
