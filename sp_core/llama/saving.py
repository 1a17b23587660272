"""Writing a model folder in Hugging Face's format, from any mesh: whole or not at all."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sp_core import arguments
from sp_core.autograd import all_gather
from sp_core.communicator import Communicator
from sp_core.errors import CheckpointError
from sp_core.llama.checkpoint import INDEX, SINGLE
from sp_core.llama.model import Llama, check_model, checkpoint_name
from sp_core.nn.gradients import placement_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def save(model: Llama, folder: str | Path, *, tokenizer: Tokenizer | None = None, max_file_bytes: int | None = None) -> None:
    """Write a model as an ordinary folder of Hugging Face, which `load` and transformers read.

    The folder gets its name when everything is in it; what a save that is killed leaves behind has another name, and no
    `config.json`.

    Args:
        model: on any mesh.
        folder: where nothing is yet, or an empty folder.
        tokenizer: for `tokenizer.json`, such as `byte_tokenizer()`. That of rank 0 is written.
        max_file_bytes: the weights go into several files, each of at most so many bytes or one tensor; into one if not given.

    Communication:
        Over the tensor ranks one all-gather of each weight; over all ranks three agreements, and one for each file.

    Raises:
        CheckpointError: something is there already, the folder cannot be written, max_file_bytes is less than 1, or the layers
            are split over stages.
        CollectiveMismatch: ranks that save differently. Both on every rank.
    """
    check_model(model)
    everyone = model.grid.everyone

    def call() -> str:
        arguments.check(folder=folder, tokenizer=tokenizer, max_file_bytes=max_file_bytes)
        if max_file_bytes is not None and max_file_bytes < 1:
            raise CheckpointError(f"max_file_bytes={max_file_bytes} was given; pass at least 1, or None for one file.")
        return f"save({folder}, {max_file_bytes}) on {everyone.name}"

    everyone.agree_on(call)
    target = Path(folder)
    files = _files({checkpoint_name(name): weight for name, weight in model.named_parameters()}, max_file_bytes)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")

    def on_first(write: Callable[[], None]) -> None:
        everyone.agree_on(
            lambda: f"save({target}, {max_file_bytes}) on {everyone.name}",
            lambda: _attempt(write, target) if everyone.rank == 0 else 0,
        )

    try:
        on_first(partial(_begin, model.grid.stages.size, target, draft))
        for file, weights in files.items():
            tensors = {name: gathered(weight, model.grid.tensor).cpu().contiguous() for name, weight in weights.items()}
            on_first(partial(_write, tensors, draft / file))
        on_first(partial(_end, model, tokenizer, files, draft, target))
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # after an error; else it has its name by now


@torch.no_grad()
def gathered(weight: nn.Parameter, tensor: Communicator) -> Tensor:
    """The whole of a weight with a placement, on every tensor rank.

    Communication:
        One all-gather of what the ranks hold.
    """
    placement = placement_of(weight)
    sizes = [sum(map(len, held)) for held in placement.held]
    return placement.join(all_gather(weight.detach(), comm=tensor, dim=placement.dim, sizes=sizes))


def _files(weights: Mapping[str, nn.Parameter], limit: int | None) -> dict[str, dict[str, nn.Parameter]]:
    """Which file gets which weights, in their order: each as many as fit."""
    groups: list[dict[str, nn.Parameter]] = [{}]
    room = limit
    for name, weight in weights.items():
        size = _size(weight)
        if limit is not None and room is not None:
            if groups[-1] and size > room:
                groups.append({})
                room = limit
            room -= size
        groups[-1][name] = weight
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


def _size(weight: nn.Parameter) -> int:
    """Bytes of a whole weight."""
    return placement_of(weight).numel * weight.element_size()


def _attempt(write: Callable[[], None], target: Path) -> int:
    try:
        write()
    except (OSError, ModuleNotFoundError) as error:
        hint = " pip install 'sp-core[llama]' installs it." if isinstance(error, ModuleNotFoundError) else ""
        raise CheckpointError(f"{target} cannot be written: {error}.{hint}") from error
    return 0


def _begin(stages: int, target: Path, draft: Path) -> None:
    if stages > 1:
        raise CheckpointError(f"the layers are split over {stages} stages, and a model is saved without pp only. Leave it out.")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target} is there already, and is no empty folder. Delete it, or save under another name.")
    draft.mkdir(parents=True)


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})  # transformers asks for this entry
    except SafetensorError as error:  # how the library reports a full disk
        raise OSError(str(error)) from error


def _end(
    model: Llama, tokenizer: Tokenizer | None, files: Mapping[str, Mapping[str, nn.Parameter]], draft: Path, target: Path
) -> None:
    """What is beside the weights, the configuration last; then the name."""
    if list(files) != [SINGLE]:
        total = sum(_size(weight) for weights in files.values() for weight in weights.values())
        places = {name: file for file, weights in files.items() for name in weights}
        _write_json({"metadata": {"total_size": total}, "weight_map": places}, draft / INDEX)
    if tokenizer is not None:
        tokenizer.save(str(draft / "tokenizer.json"))
    _write_json({**model.config.to_dict(), "dtype": str(model.dtype).removeprefix("torch.")}, draft / "config.json")
    draft.rename(target)


def _write_json(values: object, path: Path) -> None:
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
