"""Read and write model folders in Hugging Face's format: `load`, `save` and `Checkpoint`.

Weights are in `*.safetensors`; pickled files are never read. Each rank reads only its own parts of
the tensors. `save` gathers each weight, and rank 0 writes the files into a temporary folder. They
move to their place when all are complete. `train` stores the state of an optimizer in the same way.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.agreement import make_alike
from sp_core.collectives.api import all_gather
from sp_core.errors import CheckpointError
from sp_core.llama.config import ARCHITECTURE, LlamaConfig, is_there, read_json
from sp_core.llama.grid import Grid, check_unstaged
from sp_core.llama.model import Llama, check_model
from sp_core.llama.names import HEAD, UNUSED, check_names, checkpoint_name
from sp_core.mesh import Mesh
from sp_core.nn.gradients import Placement, placement_of
from sp_core.segments import grouped

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SINGLE, INDEX, STATE = "model.safetensors", "model.safetensors.index.json", "optimizer"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_REMEDY = (
    "Put removed parts back, and take added ones and wrappers out. Call prune.remove for pruned "
    "parts, and parametrize.remove_parametrizations for parametrized ones (both of torch.nn.utils)."
)

Parts = dict[str, tuple[Tensor, Placement]]
"""For each tensor, by name: this rank's part, and the placement of all parts on the ranks."""
Beside = tuple[str, Parts, dict[str, str]]
"""A description of the call; tensors for the folder STATE; further texts to write, by file."""


class Checkpoint:
    """The tensors of a model folder: in `model.safetensors`, or in several files with an index.

    If both are there the index is not read, as in transformers: an earlier save may have left it.
    The constructor reads only headers, `read` a tensor; `names` has the names of all tensors.

    Raises:
        CheckpointError, TypeError: on this rank: no path, no weights, a missing or broken file, or
            an index without a map from tensors to files of the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        arguments.check(folder=folder)
        self.folder = Path(folder)
        single = self.folder / SINGLE
        is_single = is_there(single) and not os.path.isdir(single)  # noqa: PTH112
        places = self._read_index() if not is_single and is_there(self.folder / INDEX) else {}
        if not places and not is_single:
            files = self.folder.glob("*") if is_there(self.folder) else ()
            pickled = [x.name for x in files if x.suffix in (".bin", ".pt", ".pth")]
            raise CheckpointError(
                f"{self.folder} has neither {SINGLE} nor {INDEX}. Of the pickled files "
                f"{sorted(pickled)} none is ever unpickled; convert them to safetensors."
            )
        names = sorted(set(places.values())) or [SINGLE]
        self._files = {name: _opened(self.folder / name, len(names)) for name in names}
        self._places = places or dict.fromkeys(self._files[SINGLE].keys(), SINGLE)
        self.names = tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Raises:
            CheckpointError: the dtype is not float64, float32, float16 or bfloat16.
        """
        kind = self._slice(name).get_dtype()
        if kind not in DTYPES:
            raise CheckpointError(
                f"{name} in {self._places[name]} has dtype {kind}; supported are "
                f"{', '.join(DTYPES)}. Convert the model, or take one that is not quantized."
            )
        return DTYPES[kind]

    def read(self, name: str, placement: Placement, rank: int) -> Tensor:
        """Read the part of a tensor that `rank` holds according to `placement`.

        Raises:
            CheckpointError: the tensor is missing, or its shape is not that of `placement`.
        """
        if self.shape(name) != placement.shape:
            raise CheckpointError(
                f"{name} in {self._places[name]} has shape {self.shape(name)}; the configuration "
                f"needs {placement.shape}. Weights and config.json belong to different models."
            )
        view, before = self._slice(name), (slice(None),) * placement.dim
        *others, last = (view[*before, part.start : part.stop] for part in placement.held[rank])
        return torch.cat([*others, last], placement.dim) if others else last

    def fingerprint(self) -> str:
        """Return the number of tensors and a hash of their names, shapes and dtypes."""
        text = repr([(name, self.shape(name), self.dtype(name)) for name in sorted(self.names)])
        return f"{len(self.names)} tensors #{crc32(text.encode()):08x}"

    def _slice(self, name: str) -> Any:
        """Return a tensor as a slice of safetensors, which reads the elements that are indexed."""
        if name not in self._places:
            raise CheckpointError(f"{name} is missing from the weights in {self.folder}.")
        file = self._files[self._places[name]]
        if name not in file.keys():  # noqa: SIM118  # not a dict
            missing = f"{name} is missing from {self.folder / self._places[name]}"
            raise CheckpointError(f"{missing}, where {INDEX} says it is. Copy both again.")
        return file.get_slice(name)

    def _read_index(self) -> dict[str, str]:
        """Return the file of each tensor, as the index says."""
        places: dict[str, str] = read_json(self.folder / INDEX).get("weight_map", {})
        files = places.values() if isinstance(places, dict) else ()
        if not files or not all(isinstance(x, str) and Path(x).name == x for x in files):
            raise CheckpointError(
                f"{self.folder / INDEX} has no weight_map to files of this folder. Copy it again."
            )
        return places


def _opened(path: Path, number: int) -> Any:
    """Open a file of safetensors; `number`, for the error, is how many files the index names."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        needed = "reading a model needs safetensors; install it with pip install 'sp-core[llama]'."
        raise CheckpointError(needed) from error
    try:
        path.open("rb").close()  # safe_open takes a file that it may not read for a missing one
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, of {number} in {INDEX}. Copy it too.") from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. It must be a file that this user may read."
        ) from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is broken: {error}. Copy it again.") from error


def load(
    folder: str | Path,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    scheme: str | None = None,
    tp_sp: bool = False,
) -> Llama:
    """Load a LLaMA from a folder in Hugging Face's format. Every rank calls this.

    Each rank reads only its own parts of the weights of its own layers.

    Args:
        folder: holds `config.json` and either `model.safetensors`, or else several files and
            `model.safetensors.index.json`, and no adapter. Every rank must see it.
        mesh: a mesh with any of the axes "dp", "pp", "ring", "ulysses" and "tp" (see `Grid`).
        dtype: the dtype of weights and computation; the dtype of the file if not given.
        scheme: as in `Grid.of`.
        tp_sp: as in `Llama`.

    Returns:
        The model.

    Communication:
        Two agreements (32-byte all-reduces), the second after all ranks have read their parts.

    Raises:
        CheckpointError: a folder that cannot be used. All these errors are raised on every rank.
        ShapeError, ValueError: too many ranks; as `Grid.of`.
        CollectiveMismatch: ranks with different arguments, configurations, or headers of tensors.
    """
    grid = Grid.of(mesh, scheme)

    def make() -> tuple[Llama, str]:
        arguments.check(folder=folder, tp_sp=tp_sp)
        config, checkpoint = LlamaConfig.from_folder(folder), Checkpoint(folder)
        if any(x.startswith("layers.") for x in checkpoint.names):
            raise CheckpointError(
                f'the names of weights in {folder} lack "model."; save the {ARCHITECTURE} of '
                "transformers, not its part LlamaModel."
            )
        layers = {x.split(".")[2] for x in checkpoint.names if x.startswith("model.layers.")}
        if len(layers) != config.num_hidden_layers:  # before so many layers are built
            raise CheckpointError(
                f"config.json says num_hidden_layers={config.num_hidden_layers}; the weights in "
                f"{folder} are those of {len(layers)}. They belong to different models."
            )
        model = Llama(config, grid, dtype=_dtype(checkpoint, dtype), tp_sp=tp_sp)
        check_names(checkpoint.names, config, folder, "Take weights and config.json of one model.")
        read = partial(checkpoint.read, rank=grid.tensor.rank)
        model.fill(read)
        x = dict(model.named_parameters()).get("embed_tokens.weight")
        has_two = config.tie_word_embeddings and HEAD in checkpoint.names
        if x is not None and has_two and not torch.equal(read(HEAD, placement_of(x)).to(x), x):
            raise CheckpointError(
                f"{HEAD} differs from model.embed_tokens.weight, but config.json says "
                f"tie_word_embeddings=true. Say false there, or delete {HEAD} from the files."
            )
        return model, f"load({config}, {checkpoint.fingerprint()}, {model.dtype}, tp_sp={tp_sp})"

    return make_alike(grid.everyone, make)


def _dtype(checkpoint: Checkpoint, asked: torch.dtype | None) -> torch.dtype:
    """Return `asked`, or if None the dtype of all tensors; raise an error if they differ."""
    dtypes = {checkpoint.dtype(name) for name in checkpoint.names if not name.endswith(UNUSED)}
    if asked is None and len(dtypes) != 1:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(
            f"the weights in {checkpoint.folder} have the dtypes {', '.join(names)}. "
            "Say in which one to compute (dtype= of load, --dtype of sp-core)."
        )
    return asked or dtypes.pop()


def save(
    model: Llama,
    folder: str | Path,
    *,
    tokenizer: "Tokenizer | None" = None,
    max_file_bytes: int | None = None,
) -> None:
    """Write a model as a Hugging Face folder, which `load` and transformers read.

    Every rank calls this; rank 0 of the mesh writes. Files go into a temporary folder, beside a new
    `folder` or in an empty one, and move when complete, `config.json` last. A killed save leaves at
    most that folder, its parents, and files that `load` refuses.
    transformers reads the folder only if num_attention_heads divides hidden_size.
    Copy chat template, tokenizer_config.json and generation_config.json of a loaded folder.

    Args:
        model: a model on any mesh without the axis "pp".
        folder: a path that does not exist yet, or an empty folder.
        tokenizer: what rank 0 writes to `tokenizer.json`, such as `byte_tokenizer()`.
        max_file_bytes: the largest number of bytes of weights in one file, all of which rank 0
            holds in host memory; None writes a single file. A larger tensor gets its own file.

    Communication:
        Over the tensor ranks, one all-gather of each weight. Over all ranks, three agreements
        (32-byte all-reduces), and one more for each file of weights.

    Raises:
        CheckpointError: `folder` exists and is not empty, or cannot be written; max_file_bytes is
            less than 1; the layers are split over stages; or parts were removed, added, wrapped,
            pruned or parametrized.
        CollectiveMismatch: ranks with different folders or max_file_bytes. Both on every rank.
    """

    def beside() -> Beside:
        named = model.named_parameters(remove_duplicate=False)
        check_names([checkpoint_name(x) for x, _ in named], model.config, "the model", _REMEDY)
        arguments.check(tokenizer=tokenizer)
        return "save", {}, {} if tokenizer is None else {"tokenizer.json": tokenizer.to_str(True)}

    write(model, folder, max_file_bytes, beside)


def write(
    model: Llama, folder: str | Path, max_file_bytes: int | None, beside: Callable[[], Beside]
) -> None:
    """Write a folder as `save` does, with the further tensors and texts that `beside` returns."""
    check_model(model)
    everyone, found = model.grid.everyone, list[Any]()

    def call() -> str:
        check_unstaged(model.grid)
        arguments.check(folder=folder, max_file_bytes=max_file_bytes)
        found[:] = found or [(Path(os.path.realpath(folder)), *beside())]
        return f"{found[0][1]} of {model.dtype} to {folder}, {max_file_bytes}, on {everyone.name}"

    def on_first(act: Callable[[], None]) -> None:
        everyone.agree_on(call, partial(_attempt, act, Path(folder), everyone.rank))

    everyone.agree_on(call)
    ((target, _, tensors, texts),) = found
    files = _files(".", parts_of(model, once=False), max_file_bytes, texts)
    files |= _files(STATE, tensors, max_file_bytes, texts)
    parent = target if is_there(target) else target.parent
    draft = parent / f".{target.name:.55}.{uuid.uuid4().hex}"  # at most 254 bytes
    try:
        on_first(partial(_begin, target, draft))
        for file, parts in files.items():
            kept = ((name, _gathered(*part, model)) for name, part in parts.items())
            on_first(partial(_write, dict(kept), draft / file))  # a name would hold the dict longer
        on_first(partial(_end, model, texts, draft, target))
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # after an error; else it is empty or was renamed


def parts_of(model: Llama, *, once: bool = True) -> Parts:
    """Return this rank's parts of the weights by name in a file, by all names unless `once`."""
    named = model.named_parameters(remove_duplicate=once)
    return {checkpoint_name(name): (x, placement_of(x)) for name, x in named}


@torch.no_grad()
def _gathered(part: Tensor, placement: Placement, model: Llama) -> Any:
    """Gather the parts of a tensor. Return it whole in host memory on rank 0, None elsewhere."""
    sizes = [sum(map(len, held)) for held in placement.held]
    parts = all_gather(part.detach(), comm=model.grid.tensor, dim=placement.dim, sizes=sizes)
    return None if model.grid.everyone.rank else placement.join(parts).cpu()


def _files(
    folder: str, tensors: Parts, limit: int | None, texts: dict[str, str]
) -> dict[str, Parts]:
    """Return the tensors of each file, by path, in the order of `tensors`.

    A file takes as many tensors as fit into `limit` bytes, at least one; None puts all into one
    file. If there are several files, their index is added to `texts`.
    """
    sizes = {name: one.numel * x.element_size() for name, (x, one) in tensors.items()}
    most = torch.inf if limit is None else limit
    groups = [
        {name: tensors[name] for name in names} for names in grouped(sizes, sizes.__getitem__, most)
    ]
    if len(groups) < 2:
        return {f"{folder}/{SINGLE}": group for group in groups}
    names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
    places = {name: file for file, group in zip(names, groups, strict=True) for name in group}
    total = {"total_size": sum(sizes.values())}
    texts[f"{folder}/{INDEX}"] = _json({"metadata": total, "weight_map": places})
    return {f"{folder}/{file}": group for file, group in zip(names, groups, strict=True)}


def _attempt(write: Callable[[], None], target: Path, rank: int) -> None:
    """Call `write` on rank 0 only. If `target` cannot be written, raise CheckpointError."""
    try:
        if rank == 0:
            write()
    except (OSError, ModuleNotFoundError) as error:
        is_file = isinstance(error, OSError)
        needed = "Pass a folder to write to" if is_file else "Call pip install 'sp-core[llama]'"
        raise CheckpointError(f"{target} cannot be written: {error}. {needed}.") from error


def _check_empty(target: Path, draft: Path) -> None:
    """Raise CheckpointError if `target` is a file, or a folder with anything but `draft`."""
    entries = target.iterdir() if target.is_dir() else [target] * target.exists()
    if found := sorted({*entries} - {draft}):
        full = f"{target} is there already, and is no empty folder: see {found[0]}"
        raise CheckpointError(f"{full}. Save into a new folder, or empty this one.")


def _begin(target: Path, draft: Path) -> None:
    """Check that `target` is free, and make the temporary folder `draft`."""
    _check_empty(target, draft)
    draft.mkdir(parents=True)


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    """Write whole tensors to a file of safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.parent.mkdir(exist_ok=True)
    try:
        save_file(tensors, path, metadata={"format": "pt"})  # transformers asks for this entry
    except SafetensorError as error:  # how the library reports a full disk
        raise OSError(str(error)) from error
    # safetensors lets only the owner read the file (its issue 782). The folder obeys the umask.
    with suppress(OSError):  # some file systems keep no modes
        path.chmod(path.parent.stat().st_mode & 0o666)


def _end(model: Llama, texts: Mapping[str, str], draft: Path, target: Path) -> None:
    """Write texts to the folder `draft`, last `config.json`, and move its files to `target`."""
    config = model.config.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")}
    config["eos_token_id"] = config["eos_token_id"] or None  # [] is an error in transformers
    for file, text in (*texts.items(), ("config.json", _json(config))):
        (draft / file).write_text(text, encoding="utf-8")
    _check_empty(target, draft)  # fails if another save has written there meanwhile
    if draft.parent != target:
        draft.rename(target)
        return
    for path in sorted(draft.iterdir(), key=lambda path: path.name == "config.json"):
        path.rename(target / path.name)


def _json(values: object) -> str:
    return json.dumps(values, indent="  ", allow_nan=False) + "\n"
