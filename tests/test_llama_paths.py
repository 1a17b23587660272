"""Test which paths and files of a model folder are used, and what numbers and nulls in it mean."""

import contextlib
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llama_cases import SCALINGS, mesh_of
from safetensors.torch import save_file
from test_llama_checkpoint import CASE, INDEX, contents, saved, shared, written

import sp_core as sp
from sp_core.llama import Checkpoint, LlamaConfig, create, load, save
from sp_core.llama.checkpoint import SINGLE
from sp_core.llama.config import read_json
from sp_core.testing import spmd


def test_a_number_for_the_end_and_nulls_mean_what_they_do_for_transformers() -> None:
    config = replace(CASE.config, eos_token_id=2)  # type: ignore[arg-type]
    assert config == replace(CASE.config, eos_token_id=(2,))
    assert replace(config, eos_token_id=None).eos_token_id == ()  # type: ignore[arg-type]
    config = replace(config, rope_theta=1e4)
    nulls = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": None}}
    values = config.to_dict() | dict.fromkeys(("rope_scaling", "tie_word_embeddings"))
    assert LlamaConfig.from_dict(values | nulls) == config


@pytest.mark.parametrize(("ends", "said"), [((), None), ((2,), [2]), ((2, 5), [2, 5])])
@pytest.mark.parametrize(("begin", "fill"), [(None, None), (40, 0)])
@spmd(2)
def test_a_saved_model_keeps_its_special_tokens_and_says_null_without_them(
    comm: Any,
    ends: tuple[int, ...],
    said: list[int] | None,
    begin: int | None,
    fill: int | None,
    tmp_path: Path,
) -> None:
    """With an empty list, transformers cannot generate.

    Without the entries, 1 begins a text for transformers, and 2 ends it.
    """
    names, folder = ("bos_token_id", "pad_token_id"), shared(comm, tmp_path)
    given: dict[str, Any] = dict(zip(names, (begin, fill), strict=True))
    if comm.rank == 0:
        written(CASE, folder, eos_token_id=said, **given)
    comm.Barrier()
    with mesh_of(comm, 0) as mesh:
        save(load(folder, mesh), folder / "model")
    values = read_json(folder / "model" / "config.json")
    assert values["eos_token_id"] == said
    assert {name: values[name] for name in names} == given
    assert LlamaConfig.from_folder(folder / "model").eos_token_id == ends
    assert LlamaConfig.from_folder(folder / "model") == LlamaConfig.from_folder(folder)


@pytest.mark.parametrize("given", [None, {}])
def test_an_entry_without_settings_of_a_layer_changes_nothing(given: object) -> None:
    assert LlamaConfig.from_dict(CASE.config.to_dict() | {"per_layer_config": given}) == CASE.config


@pytest.mark.parametrize("read", [LlamaConfig.from_folder, Checkpoint])
def test_a_folder_without_a_name_is_refused(read: Any) -> None:
    with pytest.raises(TypeError, match="folder=None was given; pass a name or a Path"):
        read(None)


SCALING = {"rope_type": "linear", "factor": 2.0}
YARN = SCALINGS["yarn"] or {}


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_scaling": SCALING},
        {"rope_theta": None, "rope_scaling": {**SCALING, "rope_theta": 5.0}},
        {
            "rope_scaling": SCALING,
            "original_max_position_embeddings": 7,
        },  # linear has no such entry
    ],
)
def test_a_base_and_a_scaling_are_found_in_any_entry(entries: dict[str, Any]) -> None:
    wanted = replace(CASE.config, rope_theta=5.0, rope_scaling=SCALING)
    values = {**wanted.to_dict(), "rope_scaling": None}
    assert LlamaConfig.from_dict(values | entries) == wanted


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, None),
        ({"rope_type": "default", "rope_theta": 100.0}, None),
        ({**SCALING, "rope_theta": 100.0, "partial_rotary_factor": 1.0}, SCALING),
        ({**SCALING, "factor": np.float32(2)}, SCALING),
        ({**YARN, "original_max_position_embeddings": np.int64(256)}, YARN),
    ],
)
def test_a_scaling_is_kept_as_a_file_keeps_it(given: dict[str, Any], kept: object) -> None:
    """The file of a training, read again, is then equal to the configuration of the program."""
    config = replace(CASE.config, rope_scaling=given)
    assert config.rope_scaling == kept
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_scaling": {"rope_theta": 3.0}},
        {"rope_theta": None, "rope_scaling": SCALING, "rope_parameters": {"rope_theta": 3.0}},
        {"rope_scaling": SCALING, "rope_parameters": {**SCALING, "factor": 3.0}},
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": SCALING},
        {"rope_scaling": SCALINGS["llama3"], "original_max_position_embeddings": 1024},
    ],
)
def test_entries_that_contradict_each_other_are_refused(entries: dict[str, Any]) -> None:
    """The library transformers reads some of them only."""
    with pytest.raises(sp.CheckpointError, match=r"contradict each other: .*'rope_scaling'.*Keep"):
        LlamaConfig.from_dict(CASE.config.to_dict() | entries)


@spmd(2)
def test_a_single_file_is_read_rather_than_an_index(comm: Any, tmp_path: Path) -> None:
    """As in transformers, an index that an earlier save has left is not read."""
    folder = saved(comm, tmp_path, lambda f: (f / INDEX).write_text("stale"), shards=False)
    with mesh_of(comm, 0) as mesh:
        load(folder, mesh)
    assert set(Checkpoint(folder).names) == set(CASE.weights())


@pytest.mark.parametrize("mesh", [{"tp": 3}, {"pp": 3}])
@spmd(3)
def test_a_head_beside_a_tied_embedding_must_equal_it(
    comm: Any, mesh: dict[str, Any], tmp_path: Path
) -> None:
    """It may have another dtype."""
    case = replace(CASE, layers=3, tied=True)
    folder, weights = saved(comm, tmp_path, case=case, shards=False), case.weights()
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


@spmd(2)
def test_a_folder_may_have_any_path(comm: Any, tmp_path: Path) -> None:
    """A link to an empty folder is one; a path without a name of its own is refused, too."""
    folder = shared(comm, tmp_path)
    if comm.rank == 0:
        (folder / "real").mkdir()
        (folder / "link").symlink_to("real")
    comm.Barrier()
    with mesh_of(comm, 0) as mesh:
        model = create(CASE.config, mesh)
        save(model, folder / "link")
        comm.Barrier()
        assert (folder / "link").is_symlink()
        assert len(contents(folder / "real")) == 2
        save(model, folder / "new" / ".." / "up")
        comm.Barrier()
        assert sorted(x.name for x in folder.iterdir()) == ["link", "real", "up"]
        for path, text in (
            (".", "is there already"),
            ("/", "is there already"),
            ("\0", "the character"),
        ):
            with pytest.raises((ValueError, TypeError), match=text) as caught:
                save(model, path)
            assert len(set(comm.allgather(str(caught.value)))) == 1


@spmd(1)
def test_the_working_directory_is_not_replaced(comm: Any, tmp_path: Path) -> None:
    with (
        contextlib.chdir(tmp_path),
        mesh_of(comm, 0) as mesh,
        pytest.raises(sp.CheckpointError, match="is the working directory"),
    ):
        save(create(CASE.config, mesh), ".")
    assert not contents(tmp_path)
