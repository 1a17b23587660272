"""Collect the state that `save_training` writes beside the weights; read it in `load_training`."""

import json
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.errors import CheckpointError
from sp_core.llama.checkpoint import DTYPES, STATE, Checkpoint, parts_of
from sp_core.llama.config import LlamaConfig
from sp_core.llama.model import Llama
from sp_core.nn.gradients import placement_of

Scheduler = torch.optim.lr_scheduler.LRScheduler
_REMEDY = "Make one of model.parameters()."
FORMAT = 1
"""The version of a record's format. Raise it with each change that another version cannot read."""
_CUT = {"": None}
"""The entry of a record for a large tensor. No value that is saved has an empty key."""
_COUPLING = torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon
"""The optimizers of torch that compute the update of an element with other elements, too."""


def record_of(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    generator: torch.Generator | None,
) -> dict[str, Any]:
    """Return the contents of `training.json` without the step: all state except large tensors.

    The entries are:
        "format": `FORMAT`.
        "of": the kinds of model, optimizer, scheduler and generator. Loading needs equal ones.
        "groups": the groups of parameters of the optimizer.
        "state": the state of the optimizer by parameter name. `_CUT` stands for a large tensor,
            and {"": x, "dtype": name} for a tensor of no dims that holds x.
        "schedule": the state of the scheduler; None without one.
        "random": the state of the generator in hexadecimal; "" without one.
    """
    arguments.check_type("optimizer", optimizer, torch.optim.Optimizer, _REMEDY)
    arguments.check(scheduler=scheduler, generator=generator)
    names = {weight: name for name, (weight, _) in parts_of(model).items()}
    check_optimizer(optimizer, model, CheckpointError)
    kinds = {
        "dtype": str(model.dtype),
        "optimizer": type(optimizer).__name__,
        "parameters": [[names[x] for x in group["params"]] for group in optimizer.param_groups],
        "scheduler": scheduler and _kinds(scheduler),
        "generator": generator and generator.device.type,
    }
    state: dict[str, dict[str, Any]] = {
        names[weight]: {
            kind: _CUT
            if is_cut(x, weight)
            else {"": x.item(), "dtype": str(x.dtype).removeprefix("torch.")}
            if isinstance(x, Tensor) and not x.dim()
            else x
            for kind, x in held.items()
        }
        for weight, held in optimizer.state.items()
    }
    record = {
        "format": FORMAT,
        "of": model.config.to_dict() | kinds,
        "groups": optimizer.state_dict()["param_groups"],
        "state": state,
        "schedule": scheduler and scheduler.state_dict(),
        "random": bytes(generator.get_state().tolist()).hex() if generator else "",
    }
    _check_keys(record, optimizer)
    return record


def _check_keys(record: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise CheckpointError for a key of a state, group or schedule that a file cannot restore."""
    for x in chain.from_iterable(held.values() for held in optimizer.state.values()):
        if not all(isinstance(key, str) and key for key in _keys(x)):
            refuse(record, x)
    parts = *record["groups"], record["schedule"] or {}
    for x in chain.from_iterable(part.values() for part in parts):
        if [*_keys(_numbered(json.dumps(x, skipkeys=True, default=repr)))] != [*_keys(x)]:
            refuse(record, x)


def _kinds(scheduler: object) -> Any:
    """Return the class of a scheduler; a list of that and those of its parts if it has some."""
    name, parts = type(scheduler).__name__, getattr(scheduler, "_schedulers", None)
    return [name, *map(_kinds, parts)] if parts else name


def _keys(x: object) -> Iterator[object]:
    """Yield the keys of a dict, and of all dicts inside of dicts and lists."""
    yield from x if isinstance(x, dict) else ()
    for each in x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ():
        yield from _keys(each)


def check_optimizer(optimizer: Any, model: Llama, error: type[ValueError] = ValueError) -> None:
    """Raise an error if an optimizer cannot update the weights of a model, or parts of them."""
    groups = getattr(optimizer, "param_groups", ())  # a user's own optimizer may have none
    weights = {x for group in groups for x in group["params"]}
    if not weights <= {*model.parameters()}:
        raise error(f"the optimizer has parameters that the model lacks. {_REMEDY}")
    if isinstance(optimizer, _COUPLING) and any(placement_of(x).shape != x.shape for x in weights):
        raise error(
            f"the optimizer {type(optimizer).__name__} computes updates from whole weights, and "
            f"the {model.grid.tensor.size} tensor ranks hold parts of them. Pass one that updates "
            "each element independently of the others, such as AdamW or SGD, or leave out tp."
        )


def settings_of(optimizer: Any, model: Llama) -> str:
    """Return the class and the groups of an optimizer as text, equal on ranks with equal ones."""
    numbers = {x: number for number, x in enumerate(model.parameters())}
    groups = [
        {
            name: x.tolist() if isinstance(x, Tensor) else x
            for name, given in sorted({**group, "params": params}.items())
            if isinstance(x := arguments.plain(given), Tensor | int | float | str | tuple | list)
        }
        for group in getattr(optimizer, "param_groups", ())
        for params in (sorted(numbers.get(x, -1) for x in group["params"]),)
    ]
    return f"{type(optimizer).__name__}({groups})"


def check_record(path: Path, record: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that a record from the file `path` fits the training whose record is `now`.

    The `config.json` beside it must fit, too, except for the tokens that end a sequence.

    Raises:
        CheckpointError: on this rank: a file is missing, broken, of another training, or written
            by a version of sp_core with another format.
    """
    if (found := record.get("format")) != FORMAT:
        raise CheckpointError(
            f"{path} has format {found!r:.100}, and this version of sp_core reads {FORMAT}. If the "
            "file is damaged, copy it again. Else resume the training with the state of sp_core "
            "that wrote it, or start again from its weights."
        )
    if isinstance(of := record.get("of"), dict):  # first: other kinds of parts have other entries
        _check_kinds(path, of, now["of"])
    if faults := [*_mistyped(record, now)]:
        raise _broken(path, *faults)
    config = LlamaConfig.from_folder(path.parent).to_dict()
    del config["eos_token_id"]  # generation_config.json may replace it
    _check_kinds(path.with_name("config.json"), now["of"] | config, now["of"])
    if faults := [*_unfitting(record, now)]:
        raise _broken(path, *faults)


def _check_kinds(path: Path, found: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise CheckpointError if an entry of `now` differs in `found`, from the file `path`."""
    wrong = [
        f"{name} {found.get(name)!r:.300}, now {x!r:.300}"
        for name, x in now.items()
        if found.get(name) != json.loads(json.dumps(x))  # which makes lists of tuples
    ]
    if wrong:
        raise CheckpointError(
            f"{path} is of another training: {'; '.join(wrong)}. Make model, optimizer, "
            "scheduler and generator as they were then."
        )


def _broken(path: Path, *faults: str) -> CheckpointError:
    """Return the error for a record of the file `path` that has faults."""
    return CheckpointError(
        f"{path} cannot be loaded: {'; '.join(faults)}. Copy it again, or load another one."
    )


def _mistyped(record: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield a text for each entry of a record that is missing or has another type than now."""
    for name, x in {"step": 0, **now}.items():
        if name not in record:
            yield f"{name} is missing"
        elif type(record[name]) is not type(x):
            yield f"{name} is {record[name]!r:.100}, needed {type(x).__name__}"


def _unfitting(record: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield a text for each entry of a record whose parts are not those of the record `now`."""
    found = [isinstance(group, dict) and group.get("params") for group in record["groups"]]
    wanted = [group["params"] for group in now["groups"]]
    if found != wanted:
        yield f"groups have the params {found!s:.100}, needed {wanted!s:.100}"
    else:
        groups = zip(record["groups"], now["groups"], strict=True)
        pairs = [(name, old.get(name, x), x) for old, new in groups for name, x in new.items()]
        for name, old, x in pairs:
            if _kind(old) != _kind(x):
                yield f"{name} of a group is {old!r:.100}, needed such as {x!r:.100}"
    if record["step"] < 0:
        yield f"step is {record['step']}, needed at least 0"
    names = set(chain.from_iterable(now["of"]["parameters"]))
    for name, kinds in record["state"].items():
        if name not in names or not isinstance(kinds, dict):
            yield f"state has {name!r}: {kinds!r:.100}, needed an object for each parameter"
    # torch adds private entries from version to version
    needed = {x for x in now["schedule"] or () if x[0] != "_" or x == "_schedulers"}
    if missing := needed - (record["schedule"] or {}).keys():
        yield f"schedule lacks {sorted(missing)}"


def _kind(x: object) -> object:
    """Return what a setting and the one that replaces it must have in common.

    It is one value for all numbers, one for flags and None, and a list of its items' for a list.
    """
    if isinstance(x, list | tuple):
        return [*map(_kind, x)]
    if x is None:
        return bool
    return float if type(x) is int or isinstance(x, Tensor) else type(x)


def is_cut(x: object, weight: Tensor) -> bool:
    """Return whether `x`, a value of an optimizer's state, is split over ranks as `weight` is.

    It is if it is a floating-point tensor of the shape of `weight`.
    """
    return isinstance(x, Tensor) and x.shape == weight.shape and x.dtype in DTYPES.values()


def read_parts(
    path: Path,
    record: dict[str, Any],
    model: Llama,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator | None,
) -> tuple[str, dict[str, Tensor], dict[str, Any], Tensor]:
    """Read what a record of the file `path` needs, and try to load it, but change nothing.

    Returns:
        The fingerprint of the weights, this rank's parts of the weights by name, a state for the
        optimizer, and one for the generator.

    Raises:
        CheckpointError: on this rank: the tensors, or the record, cannot be loaded.
    """
    weights, trial = Checkpoint(path.parent), object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))  # loading replaces the attributes, and changes none
    try:
        random = torch.tensor([*bytes.fromhex(record["random"])], dtype=torch.uint8, device="cpu")
        if generator is not None:
            torch.Generator(generator.device).set_state(random)
        values, state = _read(path, record, model, weights)
        load_optimizer(trial, state)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise _broken(path, f"{type(error).__name__}: {error}") from error
    groups = zip(optimizer.param_groups, trial.param_groups, strict=True)
    if lost := {name for old, new in groups for name in old.keys() - new.keys()}:
        raise _broken(path, f"groups lack {sorted(lost)}")
    return weights.fingerprint(), values, state, random


def _read(
    path: Path, record: dict[str, Any], model: Llama, weights: Checkpoint
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read this rank's parts of the weights, by name, and the state of the optimizer.

    Raises:
        CheckpointError: on this rank: a tensor is missing, or the record does not name it.
    """
    placements = {name: placement for name, (_, placement) in parts_of(model).items()}
    rank, held = model.grid.tensor.rank, record["state"]
    cut = {
        f"{name}.{kind}" for name, kinds in held.items() for kind, x in kinds.items() if x == _CUT
    }
    folder = path.with_name(STATE)
    moments = Checkpoint(folder) if cut or folder.exists() else weights
    if moments is not weights and (lost := sorted({*moments.names} - cut)):
        raise _broken(path, f"state lacks {lost[:3]}, which are in {folder}")

    def value(name: str, kind: str, x: Any) -> Any:
        if x == _CUT:
            # a view of the file may be strided, but fused optimizers read memory in order
            part = moments.read(f"{name}.{kind}", placements[name], rank)
            return part.clone(memory_format=torch.contiguous_format)
        if not isinstance(x, dict) or "" not in x:
            return x
        return torch.tensor(x[""], device="cpu", dtype=getattr(torch, x["dtype"]))

    state = {
        number: {kind: value(name, kind, x) for kind, x in held[name].items()}
        for number, name in enumerate(chain.from_iterable(record["of"]["parameters"]))
        if name in held
    }
    values = {name: weights.read(name, one, rank) for name, one in placements.items()}
    return values, {"state": state, "param_groups": record["groups"]}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state from `read_parts`, and leave its values and the dtypes of tensors as they are.

    torch casts tensors to the dtype of their parameter, except "step", and replaces texts.
    """
    optimizer.load_state_dict(state)
    weights = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, weight in enumerate(weights):
        held = state["state"].get(number, {})
        now = optimizer.state[weight] if held else {}
        for kind in held.keys() & now.keys():
            if type(x := held[kind]) is type(now[kind]):  # else the optimizer has made another
                now[kind] = x.to(now[kind].device) if isinstance(x, Tensor) else x


def keyed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record in which keys of a schedule or a group are numbers if they were numbers.

    Such keys are milestones. JSON has made texts of them.
    """
    parts = {name: _numbered(json.dumps(record[name])) for name in ("groups", "schedule")}
    return record | parts


def _numbered(text: str) -> Any:
    """Return the value of a JSON text, with each key that is the text of a number as a number."""
    return json.loads(text, object_pairs_hook=lambda pairs: {_key(key): x for key, x in pairs})


def _key(text: str) -> Any:
    """Return an int or a float if that is what JSON reads in a text, else the text."""
    with suppress(ValueError):
        if type(number := json.loads(text)) in (int, float):
            return number
    return text


def restored(value: Any, like: Any) -> Any:
    """Return a value that JSON has held, with dicts and tuples of the classes that `like` has."""
    if isinstance(value, dict) and isinstance(like, dict):
        made = copy(like)  # of a class that may need more than entries
        made.clear()
        made.update({name: restored(x, like.get(name)) for name, x in value.items()})
        return made
    if isinstance(value, list) and isinstance(like, list | tuple):
        items = [restored(*pair) for pair in zip_longest(value, like[: len(value)])]
        return tuple(items) if isinstance(like, tuple) else items
    return value


def digests(record: dict[str, Any]) -> str:
    """Return a text with a short hash of each entry of a record, equal on ranks with equal ones."""
    texts = {key: json.dumps(x).encode() for key, x in record.items()}
    return ", ".join(f"{key} #{crc32(x):08x}" for key, x in texts.items())


def refuse(record: dict[str, Any], x: object) -> None:
    """Raise CheckpointError for a value of a record that JSON cannot hold, and name its entry."""
    what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
    parts = *record["groups"], *record["state"].values(), record["schedule"] or {}
    names = [name for part in parts for name, value in part.items() if value is x]
    raise CheckpointError(
        f"{(*names, 'an entry')[0]} of the optimizer or the scheduler is {what}. Saved are "
        "numbers, texts, lists, dicts with texts as keys (none empty), and floating tensors of "
        "the shape of their parameter. Keys of a scheduler may be Python's numbers, but no texts "
        "of numbers. Make it one of these, such as float(lr), or use an optimizer without it, such "
        "as AdamW."
    )
