"""Test which paths and files of a model folder are used, and that a scaling is kept as in files."""

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from llama_cases import SCALINGS, mesh_of
from safetensors.torch import save_file
from test_llama_checkpoint import CASE, INDEX, contents, saved, shared
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.prune import l1_unstructured

import sp_core as sp
from sp_core.llama import (
    Checkpoint,
    LlamaConfig,
    byte_tokenizer,
    checkpoint,
    create,
    load,
    save,
)
from sp_core.llama.checkpoint import SINGLE
from sp_core.llama.config import is_there, read_json
from sp_core.testing import LiveBytes, spmd


def test_no_end_is_an_empty_tuple() -> None:
    assert replace(CASE.config, eos_token_id=None).eos_token_id == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(("ends", "said"), [((), None), ((2,), [2]), ((2, 5), [2, 5])])
@pytest.mark.parametrize(
    "given", [{"bos_token_id": x, "pad_token_id": y} for x, y in ((None, None), (40, 0))]
)
@spmd(2)
def test_a_saved_model_keeps_its_special_tokens_and_says_null_without_them(
    comm: Any,
    ends: tuple[int, ...],
    said: list[int] | None,
    given: dict[str, Any],
    tmp_path: Path,
) -> None:
    """With an empty list, transformers cannot generate.

    Without the entries, 1 begins a text for transformers, and 2 ends it.
    """
    folder = saved(comm, tmp_path, eos_token_id=said, **given)
    with mesh_of(comm, 0) as mesh:
        save(load(folder, mesh), folder / "model")
    values = read_json(folder / "model" / "config.json")
    assert values["eos_token_id"] == said
    assert {name: values[name] for name in given} == given
    assert LlamaConfig.from_folder(folder / "model").eos_token_id == ends
    assert LlamaConfig.from_folder(folder / "model") == LlamaConfig.from_folder(folder)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ENOENT, errno.ENOTDIR])
def test_a_file_is_missing_only_if_the_system_says_so(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening any other file gives the true reason."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", Mock(side_effect=OSError(error, "")))
        found = is_there(Path("model"))
    assert found == (error in (errno.EACCES, errno.EIO))


SCALING = {"rope_type": "linear", "factor": 2.0}
YARN = SCALINGS["yarn"] or {}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, None),
        ({"rope_type": "default", "rope_theta": 100.0}, None),
        ({**SCALING, "rope_theta": 100.0, "partial_rotary_factor": 1.0}, SCALING),
        ({**SCALING, "factor": np.float32(2)}, SCALING),
        ({"type": "linear", **SCALING, "attention_factor": None}, SCALING),
        ({"rope_type": None, "type": "linear", "factor": 2.0}, SCALING),
        ({"rope_type": None}, None),
        ({**YARN, "truncate": None}, {**YARN, "truncate": None}),
        ({**YARN, "original_max_position_embeddings": np.int64(256)}, YARN),
    ],
)
def test_a_scaling_is_kept_as_a_file_keeps_it(given: dict[str, Any], kept: object) -> None:
    """The file of a training, read again, is then equal to the configuration of the program."""
    config = replace(CASE.config, rope_scaling=given)
    (config.to_dict()["rope_scaling"] or {}).clear()
    assert config.rope_scaling == kept
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


OLD = {"type": "linear", "factor": 2.0, "attention_factor": None}
LENGTH = "original_max_position_embeddings"
PLAIN_YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {**PLAIN_YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ({"rope_scaling": OLD, "rope_parameters": {**SCALING, "rope_theta": 100.0}}, SCALING),
        ({"rope_scaling": SCALING, LENGTH: 32}, SCALING),
        ({"rope_scaling": PLAIN_YARN, LENGTH: 32}, {**PLAIN_YARN, LENGTH: 32}),
        ({"rope_scaling": PLAIN_YARN, "rope_parameters": YARN, LENGTH: 256}, YARN),
        ({"rope_scaling": LLAMA3}, {**LLAMA3, LENGTH: 128}),
        ({"rope_parameters": LLAMA3}, {**LLAMA3, LENGTH: 128}),
        (
            {"rope_scaling": LLAMA3, "max_position_embeddings": None},
            {**LLAMA3, LENGTH: 2048},
        ),
    ],
)
def test_a_scaling_takes_entries_beside_it(entries: dict[str, Any], kept: object) -> None:
    """As in transformers, with which `tests/hf` compares the frequencies."""
    values = {**CASE.config.to_dict(), "rope_scaling": None, **entries}
    assert LlamaConfig.from_dict(values).rope_scaling == kept


@pytest.mark.parametrize("heads", [1, 3])
def test_sizes_that_a_file_lacks_follow_from_the_others(heads: int) -> None:
    """As in transformers: each query head has a key/value head, and all fill the hidden size."""
    values = {**CASE.config.to_dict(), "hidden_size": 12, "num_attention_heads": heads}
    config = LlamaConfig.from_dict(values | {"num_key_value_heads": None, "head_dim": None})
    assert (config.num_key_value_heads, config.head_dim) == (heads, 12 // heads)


@spmd(2)
def test_a_single_file_is_read_rather_than_an_index(comm: Any, tmp_path: Path) -> None:
    """As in transformers, an index that an earlier save has left is not read."""
    folder = saved(comm, tmp_path, lambda f: (f / INDEX).write_text("stale"), files="one")
    with mesh_of(comm, 0) as mesh:
        load(folder, mesh)
    assert set(Checkpoint(folder).names) == set(CASE.weights())


@spmd(1)
def test_a_folder_of_links_is_read_as_one_of_files(comm: Any, tmp_path: Path) -> None:
    """So the cache of huggingface_hub keeps models."""
    folder, links = saved(comm, tmp_path), shared(comm, tmp_path)
    for path in folder.iterdir():
        (links / path.name).symlink_to(path)
    with mesh_of(comm, 0) as mesh:
        weights = [load(each, mesh).parameters() for each in (folder, links)]
        assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("mesh", [{"tp": 3}, {"pp": 3}])
@spmd(3)
def test_a_head_beside_a_tied_embedding_must_equal_it(
    comm: Any, mesh: dict[str, Any], tmp_path: Path
) -> None:
    """It may have another dtype."""
    case = replace(CASE, layers=3, tied=True)
    folder, weights = saved(comm, tmp_path, case=case, files="one"), case.weights()
    head = weights["model.embed_tokens.weight"].clone()
    with sp.Mesh(comm, **mesh) as made:
        for change, refused in ((0.0, False), (1.0, True)):
            head[-1, -1] += change
            comm.Barrier()
            if comm.rank == 0:
                save_file({**weights, "lm_head.weight": head.float()}, folder / SINGLE)
            comm.Barrier()
            text = "lm_head.weight differs from model.embed_tokens.weight"
            with pytest.raises(sp.CheckpointError, match=text) if refused else nullcontext():
                load(folder, made, dtype=torch.float32)


CHANGED: dict[str, Callable[[Any], object]] = {
    "down_proj.weight_orig": lambda model: l1_unstructured(
        model.layers[0].mlp["down_proj"], "weight", 0.3
    ),
    "embed_tokens.parametrizations": lambda model: register_parametrization(
        model.embed_tokens, "weight", torch.nn.Identity()
    ),
    "model.layers.0.inp": lambda model: model.layers.__delitem__(0),
    "norm.bias": lambda model: setattr(model.norm, "bias", torch.nn.Parameter(torch.ones(10))),
}
"""By a part of the error: a change of a model after which it is no LLaMA."""


@pytest.mark.parametrize("what", CHANGED)
@spmd(1, 2)
def test_a_model_with_other_weights_than_its_configuration_says_is_not_saved(
    comm: Any, what: str, tmp_path: Path
) -> None:
    """Only the last rank's model was changed."""
    folder = shared(comm, tmp_path)
    with mesh_of(comm, 0) as mesh:
        model = CASE.model(mesh)
        if comm.rank == comm.size - 1:
            CHANGED[what](model)
        with pytest.raises(sp.CheckpointError, match=f"{what}.*prune.remove"):
            save(model, folder / "model")
    assert not [*folder.iterdir()]


def filled(comm: Any, tmp_path: Path) -> Path:
    """Return a folder, the same one on all ranks, with two files, empty folders, and links."""
    folder = shared(comm, tmp_path)
    if comm.rank == 0:
        for name in ("empty", "full", "real"):
            (folder / name).mkdir()
        for name in ("file", "full/file"):
            (folder / name).write_text("notes")
        for name, target in (("loop", "loop"), ("link", "real")):
            (folder / name).symlink_to(target)
    comm.Barrier()
    return folder


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("empty", "empty"),
        ("link", "real"),
        ("new/../up", "up"),
        *((name, name) for name in ("n" * 255, "\U0001d52b" * 63)),  # 252 bytes in UTF-8
    ],
    ids=["an empty folder", "a link", "a path through a new folder", "a long name", "wide letters"],
)
@spmd(3)
def test_a_model_is_saved_in_a_new_or_an_empty_folder(
    comm: Any, path: str, place: str, tmp_path: Path
) -> None:
    folder = filled(comm, tmp_path)
    with mesh_of(comm, 0) as mesh:
        save(create(CASE.config, mesh), folder / path)
        comm.Barrier()
    made = {f"{place}/config.json", f"{place}/model.safetensors"}
    assert contents(folder).keys() == made | {"file", "full/file"}
    assert (folder / "link").is_symlink()
    assert not (folder / "new").exists()


THERE = "{} is there already.*Save into a new folder"
FAILS = "{} cannot be written: .*Pass a folder to write to"
NOT_WRITTEN: dict[str, tuple[str, str, type[Exception]]] = {
    "a full folder": ("full", "{0} is there .*: see {0}/file. Save into a new", sp.CheckpointError),
    "a file": ("file", THERE, sp.CheckpointError),
    "the root": ("/", THERE, sp.CheckpointError),
    "a folder in a file": ("file/model", FAILS, sp.CheckpointError),
    "a name that is too long": ("n" * 300, FAILS, sp.CheckpointError),
    "a link to itself": ("loop", FAILS, sp.CheckpointError),
    "a folder in a link to itself": ("loop/model", FAILS, sp.CheckpointError),
    "a name with the character 0": ("\0", ".*the character", TypeError),
}
"""By what the path is: the path, the error's text with {} for the path, and the error's class."""


@pytest.mark.parametrize("what", NOT_WRITTEN)
@spmd(3)
def test_what_is_there_is_never_written_over(comm: Any, what: str, tmp_path: Path) -> None:
    path, text, kind = NOT_WRITTEN[what]
    folder = filled(comm, tmp_path)
    with mesh_of(comm, 0) as mesh:
        wanted = text.format(re.escape(str(folder / path)))
        with pytest.raises(kind, match=f"^rank 0: {wanted}") as caught:
            save(create(CASE.config, mesh), folder / path)
        assert type(caught.value) is kind
        assert len(set(comm.allgather(str(caught.value)))) == 1
    assert contents(folder) == dict.fromkeys(("file", "full/file"), b"notes")


@spmd(3)
def test_a_file_has_as_many_bytes_of_weights_as_it_may(comm: Any, tmp_path: Path) -> None:
    """Rank 0 holds the weights of one file, and a tensor that is gathered for it."""
    folder = shared(comm, tmp_path)
    sizes = [x.nbytes // 2 for x in CASE.weights().values()]
    size = sum(sizes)
    with mesh_of(comm, 0) as mesh:
        model = create(CASE.config, mesh)
        own = [*model.parameters()]
        for limit, files in ((size, 1), (size - 1, 2), (size // 2, 3)):
            with LiveBytes(own) as live:
                save(model, folder / f"{limit}", max_file_bytes=limit)
            assert live.peak - sum(x.nbytes for x in own) <= limit + max(sizes)
            assert len([*(folder / f"{limit}").glob("*.safetensors")]) == files
        assert f'"total_size": {size}\n' in (folder / f"{size - 1}" / INDEX).read_text()


@spmd(1)
def test_an_empty_folder_stays_when_a_model_is_saved_in_it(comm: Any, tmp_path: Path) -> None:
    """It keeps its mode, here 0o700, and may be the working directory.

    A save in a new folder needs no working directory.
    """
    target, gone, new = (shared(comm, tmp_path) for _ in range(3))
    with mesh_of(comm, 0) as mesh, contextlib.chdir(target):
        model, old = create(CASE.config, mesh), target.stat()
        save(model, ".")
        assert (target.stat().st_ino, target.stat().st_mode) == (old.st_ino, old.st_mode)
        assert contents(target).keys() == {"config.json", "model.safetensors"}
        os.chdir(gone)
        gone.rmdir()
        save(model, new / "model")
    assert contents(new / "model") == contents(target)


@spmd(1)
def test_the_configuration_moves_last(comm: Any, tmp_path: Path) -> None:
    """So `load` refuses a folder whose save was killed meanwhile."""
    noted = patch.object(Path, "rename", autospec=True, side_effect=Path.rename)
    with mesh_of(comm, 0) as mesh, noted as rename:
        save(create(CASE.config, mesh), shared(comm, tmp_path), tokenizer=byte_tokenizer())
    moved = [one.args[0].name for one in rename.mock_calls]
    assert {*moved[:-1]} >= {SINGLE, "tokenizer.json"}
    assert moved[-1] == "config.json"


@pytest.fixture(params=[0o027, 0o077])
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set a umask. Return the mode that it leaves to new files."""
    old = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(old)


@spmd(1)
def test_the_umask_says_who_may_read_a_saved_model(comm: Any, mode: int, tmp_path: Path) -> None:
    folder = shared(comm, tmp_path)
    with mesh_of(comm, 0) as mesh:
        save(create(CASE.config, mesh), folder / "model")
    assert {path.stat().st_mode & 0o777 for path in (folder / "model").iterdir()} == {mode}


@spmd(1)
def test_two_saves_into_an_empty_folder_do_not_mix(
    comm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other save writes to the folder while a model is saved in it."""

    def write(tensors: Any, path: Path, really: Any = checkpoint._write) -> None:
        really(tensors, path)
        (path.parents[1] / "config.json").write_text("other")

    monkeypatch.setattr(checkpoint, "_write", write)
    folder = shared(comm, tmp_path)
    with mesh_of(comm, 0) as mesh, pytest.raises(sp.CheckpointError, match="is there already"):
        save(create(CASE.config, mesh), folder)
    assert contents(folder) == {"config.json": b"other"}
