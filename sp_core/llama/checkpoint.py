"""Model folders: each rank reads its own slices of the tensors in `*.safetensors`. Nothing is unpickled."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.errors import CheckpointError
from sp_core.llama.config import LlamaConfig, read_json
from sp_core.llama.grid import Grid
from sp_core.llama.model import Llama, parameter_names
from sp_core.mesh import Mesh
from sp_core.nn.gradients import Placement

if TYPE_CHECKING:
    from safetensors import safe_open

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNUSED = (".rotary_emb.inv_freq",)  # older files hold these; they follow from the configuration


class Checkpoint:
    """The tensors of a model folder, by name. Only headers are read until `read`.

    Raises:
        CheckpointError: no weights, a file that is missing or broken, or an index that is wrong.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, safe_open] = {}
        self._places = self._read_index() if (self.folder / INDEX).exists() else self._read_single()

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors."""
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor.

        Raises:
            CheckpointError: it is none of the floating ones that are supported.
        """
        kind = self._slice(name).get_dtype()
        if kind not in DTYPES:
            raise CheckpointError(
                f"{name} in {self._places[name]} has dtype {kind}; supported are {', '.join(DTYPES)}. Convert the model, or take "
                "one that is not quantized."
            )
        return DTYPES[kind]

    def read(self, name: str, placement: Placement, rank: int) -> Tensor:
        """A rank's part of a tensor.

        Raises:
            CheckpointError: the tensor is missing, or has another shape.
        """
        if self.shape(name) != placement.shape:
            raise CheckpointError(
                f"{name} in {self._places[name]} has shape {self.shape(name)}; the configuration needs {placement.shape}. "
                "Weights and config.json belong to different models."
            )
        view = self._slice(name)
        cut: list[Any] = [
            view[part.start : part.stop] if placement.dim == 0 else view[:, part.start : part.stop] for part in placement.held[rank]
        ]
        return cut[0] if len(cut) == 1 else torch.cat(cut, placement.dim)

    def fingerprint(self) -> str:
        """A short text that differs between checkpoints with other tensors, shapes or dtypes."""
        text = repr([(name, self.shape(name), self.dtype(name)) for name in sorted(self.names)])
        return f"{len(self.names)} tensors #{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"

    def _slice(self, name: str) -> Any:
        if name not in self._places:
            raise CheckpointError(f"{name} is missing from the weights in {self.folder}.")
        file = self._open(self._places[name])
        if name not in file.keys():  # noqa: SIM118  # not a dict
            raise CheckpointError(
                f"{name} is missing from {self.folder / self._places[name]}, where {INDEX} says it is. Copy both again."
            )
        return file.get_slice(name)

    def _open(self, name: str) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ModuleNotFoundError as error:
            raise CheckpointError("reading a model needs safetensors; install it with pip install 'sp-core[llama]'.") from error
        path = self.folder / name
        if name not in self._files:
            try:
                self._files[name] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{path} is missing, of {len(set(self._places.values()))} that {INDEX} names. Copy it too."
                ) from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is broken: {error}. Copy it again.") from error
        return self._files[name]

    def _read_index(self) -> dict[str, str]:
        places = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(x, str) and Path(x).name == x for x in places.values()):
            raise CheckpointError(f"{self.folder / INDEX} has no weight_map from tensors to files of this folder. Copy it again.")
        self._places = places
        for name in sorted(set(places.values())):
            self._open(name)
        return places

    def _read_single(self) -> dict[str, str]:
        if not (self.folder / SINGLE).exists():
            pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.folder.glob(pattern))
            hint = (
                f" There is {pickled[0]}, which would have to be unpickled and never is: convert it to safetensors."
                if pickled
                else ""
            )
            raise CheckpointError(f"{self.folder} has neither {SINGLE} nor {INDEX}.{hint}")
        self._places = {}
        return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)


def load(
    folder: str | Path, mesh: Mesh, *, dtype: torch.dtype | None = None, scheme: str | None = None, tp_sp: bool = False
) -> Llama:
    """Load a LLaMA from a folder in Hugging Face's format, each rank only its own slices of its own layers.

    Args:
        folder: holds `config.json` and either `model.safetensors`, or several files and `model.safetensors.index.json`.
        mesh: with any of the axes "dp", "pp", "ring", "ulysses" and "tp".
        dtype: in which to compute; that of the file if not given.
        scheme: as in `Grid.of`.
        tp_sp: as in `Llama`.

    Returns:
        The model.

    Communication:
        Two agreements, the second one after everything has been read.

    Raises:
        CheckpointError: a folder that cannot be used.
        ShapeError: too many ranks.
        CollectiveMismatch: ranks that see different folders.

    All of these on every rank.
    """
    grid = Grid.of(mesh, scheme)
    found: list[Llama] = []

    def call() -> str:
        arguments.check(folder=folder, tp_sp=tp_sp)
        config, checkpoint = LlamaConfig.from_folder(folder), Checkpoint(folder)
        _check_layers(checkpoint, config)
        model = Llama(config, grid, dtype=_one_dtype(checkpoint) if dtype is None else dtype, tp_sp=tp_sp)
        _check_names(checkpoint, model)
        model.fill(lambda name, placement: checkpoint.read(name, placement, grid.tensor.rank))
        found.append(model)
        return f"load({config}, {checkpoint.fingerprint()}, {model.dtype}, tp_sp={tp_sp})"

    grid.everyone.agree_on(call)
    return found[0]


def _one_dtype(checkpoint: Checkpoint) -> torch.dtype:
    dtypes = {checkpoint.dtype(name) for name in checkpoint.names if not name.endswith(_UNUSED)}
    if len(dtypes) != 1:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(
            f"the weights in {checkpoint.folder} have the dtypes {', '.join(names)}. Say in which one to compute: dtype=..."
        )
    return dtypes.pop()


def _check_layers(checkpoint: Checkpoint, config: LlamaConfig) -> None:
    """Refuse another number of layers before they are built, which for a number that is absurd would never end."""
    layers = {name.split(".")[2] for name in checkpoint.names if name.startswith("model.layers.")}
    if len(layers) != config.num_hidden_layers:
        raise CheckpointError(
            f"config.json says num_hidden_layers={config.num_hidden_layers}; the weights in {checkpoint.folder} are those of "
            f"{len(layers)}. They belong to different models."
        )


def _check_names(checkpoint: Checkpoint, model: Llama) -> None:
    """Refuse tensors that the model has no place for: without them it would compute something else."""
    expected = parameter_names(model)
    missing = sorted(expected - set(checkpoint.names))
    if missing:
        raise CheckpointError(f"{_some(missing)} missing from the weights in {checkpoint.folder}; config.json asks for them.")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    extra = sorted(name for name in set(checkpoint.names) - expected - tied if not name.endswith(_UNUSED))
    if extra:
        raise CheckpointError(f"{_some(extra)} in {checkpoint.folder}, for which a model with its config.json has no place.")
    for name in expected:
        checkpoint.dtype(name)


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} {'is' if len(names) == 1 else 'are'}"
