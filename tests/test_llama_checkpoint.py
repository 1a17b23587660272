"""Test model folders: each rank reads its own slices, and a folder is saved whole or not at all.

A broken folder raises the same error on every rank.
"""

import json
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from domains import folders
from llama_cases import Case, mesh_of
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import sp_core as sp
from sp_core.llama import Checkpoint, Decoder, checkpoint, create, load, save
from sp_core.llama.train import load_training, save_training, train_step
from sp_core.testing import LiveBytes, spmd

CASE = Case((6, 3), layers=1)
INDEX = "model.safetensors.index.json"
SPRUNG = "unpickled"
FIRST, SECOND = "part-0.safetensors", "part-1.safetensors"


def written(case: Case, folder: Path, files: str = "two", **changes: Any) -> None:
    """Write a model folder as Hugging Face does, with other values in its configuration."""
    drawn = {"folder.files": files, "folder.dtypes": "one", "folder.more": "nothing"}
    folders.written(case, folder, drawn)
    configured(**changes)(folder)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def shared(comm: Any, tmp_path: Path) -> Path:
    """Return a new folder, the same one on all ranks."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path)) if comm.rank == 0 else None
    found: Path = comm.bcast(folder, root=0)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a folder, by path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def saved(
    comm: Any,
    tmp_path: Path,
    then: Callable[[Path], object] = lambda folder: None,
    *,
    case: Case = CASE,
    **options: Any,
) -> Path:
    folder = shared(comm, tmp_path)
    if comm.rank == 0:
        written(case, folder, **options)
        then(folder)
    comm.Barrier()
    return folder


@pytest.mark.parametrize("tensor", [1, 2, 4])
@spmd(4)
def test_what_a_rank_holds_is_its_part_of_the_weights_and_of_the_cache(
    comm: Any, tensor: int, tmp_path: Path
) -> None:
    """Count the bytes of tensors that are alive.

    Weights: 1/tp of all, and the norms. While loading, also one tensor of the file and the slice
    that is cut from it. While saving, also one tensor in two buffers; on rank 0 a whole file.

    Cache: 1/4 of all tokens and one token more. A step of a decoder leaves no other tensor behind.
    """
    case = Case((8, 4), layers=3, head_dim=8, hidden=64, ffn=128, vocab=96)
    norms, angles = (2 * case.layers + 1) * case.hidden * 8, case.head_dim // 2 * 8
    room = [30, 9, 3]
    sizes = [x.nbytes for x in case.weights().values()]
    token = case.layers * 2 * case.heads[1] * case.head_dim * 8
    folder = saved(comm, tmp_path, case=case)
    with sp.Mesh(comm, check="off", ring=4 // tensor, tp=tensor) as mesh, LiveBytes() as live:
        model = load(folder, mesh)
        weights = live.now
        assert weights <= (sum(sizes) - norms) // tensor + norms + angles
        assert live.peak <= weights + 2 * max(sizes)
        decoder = Decoder(model, room)
        cache = live.now - weights
        assert cache <= sum(room) * token / 4 + token
        decoder.prefill([[1] * (most - 2) for most in room])
        for _ in range(2):
            decoder.decode([[1]] * len(room))
        assert live.now == weights + cache
        for most in (sum(sizes), sum(sizes) // 3):
            with LiveBytes(model.parameters()) as saving:
                save(model, folder / f"again {most}", max_file_bytes=most)
            assert saving.peak <= weights + 2 * max(sizes) + most * (comm.rank == 0)


@spmd(1, 2)
def test_a_model_of_wrapped_layers_and_a_shared_weight_is_saved_under_its_own_names(
    comm: Any, tmp_path: Path
) -> None:
    folder = shared(comm, tmp_path)
    with mesh_of(comm, 0) as mesh:
        model = CASE.model(mesh)
        model.lm_head.weight = model.embed_tokens.weight
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        train_step(model, optimizer, [[1, 2, 3]], max_norm=1.0)
        wrapped: Any = torch.compile(checkpoint_wrapper(model.layers[0]), backend="eager")
        model.layers[0] = wrapped
        save_training(model, folder / "shared", optimizer=optimizer, step=1)
        load_training(model, folder / "shared", optimizer=optimizer)
        save(load(folder / "shared", mesh), folder / "loaded")
        save(model, folder / "saved")
        assert contents(folder / "saved") == contents(folder / "loaded")


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-9])


def pickled(folder: Path) -> None:
    for path in (folder / INDEX, folder / FIRST, folder / SECOND):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(trap(folder))


def trap(folder: Path) -> bytes:
    """Return a pickle that creates the file SPRUNG when it is unpickled."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (folder / SPRUNG,)

    return pickle.dumps(Trap())


def configured(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", lambda values: values.update(changes))


def with_tensor(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    """Return a change: all weights in a single file, with one tensor replaced or added."""

    def change(folder: Path) -> None:
        (folder / INDEX).unlink()
        save_file({**CASE.weights(), name: value}, folder / "model.safetensors")

    return change


def unfiled(folder: Path, gone: str = INDEX, made: str = "model.safetensors") -> None:
    (folder / gone).unlink()
    (folder / made).mkdir()


def unprefixed(index: dict[str, Any]) -> None:
    index["weight_map"] = {x.removeprefix("model."): y for x, y in index["weight_map"].items()}


NORM = "model.norm.weight"
ADAPTER, ADAPTED = (
    "adapter_config.json",
    r"has an adapter.*merge_and_unload\(\).*adapter_config\.json away",
)
BROKEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no configuration": ("config.json is not there", drop("config.json")),
    "an adapter": (ADAPTED, lambda f: (f / ADAPTER).write_text("{}")),
    "an adapter without the model that it adapts": (
        ADAPTED,
        lambda f: [(f / name).replace(f / ADAPTER) for name in (INDEX, FIRST, "config.json")],
    ),
    "a configuration that is no JSON": (
        "config.json cannot be read",
        lambda f: (f / "config.json").write_text("{"),
    ),
    "a configuration that is a list": (
        "config.json holds a list",
        lambda f: (f / "config.json").write_text("[]"),
    ),
    "a missing shard": (f"{FIRST} is missing, of 2", drop(FIRST)),
    "a shard that is cut off": (f"{SECOND} is broken", cut(SECOND)),
    "a shard that is something else": (
        f"{FIRST} is broken",
        lambda f: (f / FIRST).write_bytes(trap(f)),
    ),
    "a folder in place of a shard": (
        f"{FIRST} cannot be read: .*Is a directory",
        lambda f: unfiled(f, FIRST, FIRST),
    ),
    "another architecture": ("config.json: model_type 'mistral'", configured(model_type="mistral")),
    "more layers than there are weights": (
        "num_hidden_layers=1000000000; the weights in .* of 1",
        configured(num_hidden_layers=10**9),
    ),
    "weights of the model without its head": (
        'names of weights in .* lack "model."; save the LlamaForCausalLM',
        lambda f: edit(f / INDEX, unprefixed),
    ),
    "an index that is no JSON": (
        f"{INDEX} cannot be read",
        lambda f: (f / INDEX).write_text("weights"),
    ),
    "an index without a map": (
        "no weight_map",
        lambda f: edit(f / INDEX, lambda x: x.pop("weight_map")),
    ),
    "an index that leaves the folder": (
        "no weight_map",
        lambda f: edit(f / INDEX, lambda x: x["weight_map"].update({NORM: "../x.safetensors"})),
    ),
    "a tensor in another shard": (
        f"{NORM} is missing from .*{INDEX} says",
        lambda f: edit(
            f / INDEX,
            lambda x: x["weight_map"].update(
                {NORM: (SECOND, FIRST)[x["weight_map"][NORM] == SECOND]}
            ),
        ),
    ),
    "a missing tensor": (
        rf"lacks 1 of .*\['{NORM}'\]",
        lambda f: edit(f / INDEX, lambda x: x["weight_map"].pop(NORM)),
    ),
    "a missing head": (
        r"lacks 1 of .*\['lm_head.weight'\]",
        lambda f: edit(f / INDEX, lambda x: x["weight_map"].pop("lm_head.weight")),
    ),
    "no weights": ("has neither", lambda f: [drop(name)(f) for name in (INDEX, FIRST, SECOND)]),
    "a folder for the weights": ("has neither", unfiled),
    "pickled weights": (
        r"the pickled files \['pytorch_model.bin'\] none is ever unpickled",
        pickled,
    ),
    "a wrong shape": (
        rf"{NORM} in .* has shape \(11,\)",
        with_tensor(NORM, torch.ones(11).double()),
    ),
    "a quantized tensor": ("dtype I8", with_tensor(NORM, torch.ones(10, dtype=torch.int8))),
    "two dtypes": ("float64. Say in which .*--dtype of sp", with_tensor(NORM, torch.ones(10))),
    "a tensor too many": (
        "has 1 that it does not need, .*q_proj.bias",
        with_tensor("model.layers.0.self_attn.q_proj.bias", torch.ones(24).double()),
    ),
}


@pytest.mark.parametrize("what", sorted(BROKEN))
@spmd(3)
def test_a_broken_folder_is_the_same_error_on_every_rank(
    comm: Any, what: str, tmp_path: Path
) -> None:
    text, damage = BROKEN[what]
    folder = saved(comm, tmp_path, damage)
    with mesh_of(comm, 0) as mesh, pytest.raises(sp.CheckpointError, match=text):
        load(folder, mesh)
    assert not (folder / SPRUNG).exists()


@spmd(3)
def test_a_folder_with_other_weights_on_one_rank_is_refused(comm: Any, tmp_path: Path) -> None:
    folder, lower = (saved(comm, tmp_path, case=x) for x in (CASE, replace(CASE, dtype="float32")))
    with mesh_of(comm, 0) as mesh, pytest.raises(sp.CollectiveMismatch, match="load"):
        load(folder if comm.rank else lower, mesh, dtype=torch.float64)
    with pytest.raises(sp.CheckpointError, match="lost is missing from the weights"):
        Checkpoint(folder).shape("lost")


FAULTS = [
    (OSError(28, "No space left"), r"No space left\. Pass a folder"),
    (ModuleNotFoundError("Not there"), r"Not there\. Call pip install 'sp-core\[llama\]'"),
]


@pytest.fixture(params=FAULTS)
def ending(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a save fail after two files of weights; return the pattern of its error."""
    fault, text = request.param
    ends = chain([DEFAULT] * 2, repeat(fault))
    monkeypatch.setattr(checkpoint, "_write", Mock(wraps=checkpoint._write, side_effect=ends))
    return text


@spmd(3)
def test_a_save_that_fails_is_an_error_on_every_rank_and_leaves_nothing(
    comm: Any, tmp_path: Path, ending: str
) -> None:
    folder = shared(comm, tmp_path)
    (folder / "empty").mkdir(exist_ok=True)
    with mesh_of(comm, 0) as mesh:
        for name in ("model", "empty"):
            with pytest.raises(sp.CheckpointError, match=f"cannot be written: .*{ending}"):
                save(create(CASE.config, mesh), folder / name, max_file_bytes=1)
        comm.Barrier()
        assert list(folder.rglob("*")) == [folder / "empty"]


@spmd(1)
def test_a_save_that_is_interrupted_leaves_nothing(
    comm: Any, substitute: Any, tmp_path: Path
) -> None:
    substitute(checkpoint, _write=Mock(side_effect=KeyboardInterrupt))
    folder = shared(comm, tmp_path)
    with mesh_of(comm, 0) as mesh, pytest.raises(KeyboardInterrupt):
        save(create(CASE.config, mesh), folder / "model")
    assert not [*folder.iterdir()]


@spmd(2)
def test_what_a_killed_save_leaves_does_not_load(
    comm: Any, substitute: Any, tmp_path: Path
) -> None:
    """The save fails after it has written the weights, and cleans nothing up."""
    substitute(checkpoint, shutil=Mock(), _json=Mock(side_effect=OSError("killed")))
    folder = shared(comm, tmp_path)
    with mesh_of(comm, 0) as mesh:
        with pytest.raises(sp.CheckpointError, match=": killed"):
            save(create(CASE.config, mesh), folder / "model")
        (left,) = folder.iterdir()
        assert (left / "model.safetensors").exists()
        with pytest.raises(sp.CheckpointError, match=r"config\.json is not there"):
            load(left, mesh)
