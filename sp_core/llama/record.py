"""Collect the state that `save_training` writes beside the weights; read it in `load_training`."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.errors import CheckpointError
from sp_core.llama.checkpoint import DTYPES, STATE, Checkpoint, parts_of
from sp_core.llama.model import Llama

Scheduler = torch.optim.lr_scheduler.LRScheduler


def record_of(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    generator: torch.Generator | None,
) -> dict[str, Any]:
    """Return the contents of `training.json` without the step: all state except large tensors.

    The entries are:
        "of": the kinds of model, optimizer, scheduler and generator. `load_training` needs equal
            ones.
        "groups": the groups of parameters of the optimizer.
        "state": the state of the optimizer by parameter name. {} stands for a large tensor, and
            {"": x} for a tensor of one number x.
        "schedule": the state of the scheduler; None without one.
        "random": the state of the generator in hexadecimal; "" without one.
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
            if is_cut(x, weight)
            else {"": x.item()}
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


def is_cut(x: object, weight: Tensor) -> bool:
    """Return whether `x` of an optimizer's state is a floating tensor of the shape of `weight`."""
    return isinstance(x, Tensor) and x.shape == weight.shape and x.dtype in DTYPES.values()


def read_parts(
    model: Llama, weights: Checkpoint, record: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    """Read this rank's parts of weights, by name, and of optimizer state, by parameter number."""
    placements = {name: placement for name, (_, placement) in parts_of(model).items()}
    rank, held = model.grid.tensor.rank, record["state"]
    has_cut = any(x == {} for kinds in held.values() for x in kinds.values())
    moments = Checkpoint(weights.folder / STATE) if has_cut else weights

    def value(name: str, kind: str, x: Any) -> Any:
        if x == {}:
            return moments.read(f"{name}.{kind}", placements[name], rank)
        return torch.tensor(x[""]) if isinstance(x, dict) and "" in x else x

    state = {
        number: {kind: value(name, kind, x) for kind, x in held[name].items()}
        for number, name in enumerate(chain.from_iterable(record["of"]["parameters"]))
        if name in held
    }
    return {name: weights.read(name, one, rank) for name, one in placements.items()}, state


def keyed(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    """Return a JSON object as a dict. Keys that are numbers, such as milestones, become ints."""
    return {int(key) if key.isdecimal() else key: value for key, value in pairs}


def digests(record: dict[str, Any]) -> str:
    """Return a text with a short hash of each entry of a record, equal on ranks with equal ones."""
    texts = {key: json.dumps(x, default=refuse).encode() for key, x in record.items()}
    return ", ".join(f"{key} #{crc32(x):08x}" for key, x in texts.items())


def refuse(x: object) -> None:
    """Raise CheckpointError for a value that JSON cannot hold; `json.dumps` calls this."""
    what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
    raise CheckpointError(
        f"the optimizer or the scheduler holds {what}. Saved are numbers, texts, lists, and "
        "floating tensors of the shape of their parameter. Use others, such as AdamW."
    )
