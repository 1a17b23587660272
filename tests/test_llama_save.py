"""Random models and saved ones: the same for every mesh, and a folder is whole or not there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llama_cases import Case, mesh_of

import sp_core as sp
from sp_core.llama import byte_tokenizer, checkpoint, create, load, save
from sp_core.llama.text import read_tokenizer
from sp_core.testing import spmd

CASE = Case((6, 3), layers=1)
"""Number of the mesh, whether the head is the embedding, and the limit of a file."""
"""Bytes that safetensors may put in front of a few tensors."""


def shared(comm: Any, tmp_path: Path) -> Path:
    """A new folder for all ranks."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path)) if comm.rank == 0 else None
    found: Path = comm.bcast(folder, root=0)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@spmd(2)
def test_layers_that_are_split_over_stages_are_not_saved(comm: Any, tmp_path: Path) -> None:
    folder = shared(comm, tmp_path)
    with (
        sp.Mesh(comm, pp=2) as mesh,
        pytest.raises(sp.CheckpointError, match=r"rank 0: .*2 stages.*without pp"),
    ):
        save(create(Case((4, 2)).config, mesh), folder / "staged")
    assert not contents(folder)


@spmd(1, 3)
def test_what_is_there_is_never_written_over(comm: Any, tmp_path: Path) -> None:
    folder = shared(comm, tmp_path)
    if comm.rank == 0:
        (folder / "empty").mkdir()
        (folder / "file").write_text("notes")
    comm.Barrier()
    with mesh_of(comm, 0) as mesh:
        model = create(CASE.config, mesh)
        save(model, folder / "empty")
        before = contents(folder / "empty")
        with pytest.raises(
            sp.CheckpointError, match=r"rank 0: .*empty is there already.*Delete it"
        ):
            save(create(CASE.config, mesh, seed=1), folder / "empty")
        with pytest.raises(sp.CheckpointError, match="file is there already"):
            save(model, folder / "file")
        with pytest.raises(sp.CheckpointError, match="cannot be written"):
            save(model, folder / "file" / "model")
        with pytest.raises(sp.CheckpointError, match=r"max_file_bytes=-1 was given"):
            save(model, folder / "other", max_file_bytes=-1)
        assert contents(folder / "empty") == before
        assert (folder / "file").read_text() == "notes"
        if comm.size > 1:
            with pytest.raises(sp.CollectiveMismatch, match="save"):
                save(model, folder / f"model{comm.rank}")


@pytest.fixture
def ending_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for two files of weights."""
    written: list[Path] = []

    def write(tensors: Any, path: Path, really: Any = checkpoint._write) -> None:
        if len(written) == 2:
            written.clear()
            raise OSError(28, "No space left on device")
        written.append(path)
        really(tensors, path)

    monkeypatch.setattr(checkpoint, "_write", write)


@pytest.mark.usefixtures("ending_disk")
@spmd(1, 3)
def test_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(
    comm: Any, tmp_path: Path
) -> None:
    folder = shared(comm, tmp_path)
    with mesh_of(comm, 0) as mesh:
        with pytest.raises(sp.CheckpointError, match=r"cannot be written: .*No space left"):
            save(create(CASE.config, mesh), folder / "model", max_file_bytes=1)
        comm.Barrier()
        assert list(folder.iterdir()) == []


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that ends where the folder would get its name, and cleans nothing up."""

    def end(*_: Any) -> None:
        raise OSError("killed")

    monkeypatch.setattr(checkpoint, "shutil", SimpleNamespace(rmtree=lambda *_, **__: None))
    monkeypatch.setattr(checkpoint, "_json", end)


@pytest.mark.usefixtures("killed")
@spmd(1, 2)
def test_what_a_killed_save_leaves_does_not_load(comm: Any, tmp_path: Path) -> None:
    folder = shared(comm, tmp_path)
    with mesh_of(comm, 0) as mesh:
        with pytest.raises(sp.CheckpointError, match="killed"):
            save(create(CASE.config, mesh), folder / "model")
        (left,) = folder.iterdir()
        assert (left / "model.safetensors").exists()
        with pytest.raises(sp.CheckpointError, match=r"config\.json is not there"):
            load(left, mesh)


@pytest.mark.mpi_skip
def test_a_saved_tokenizer_is_read(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path).encode("für\n").ids == list("für\n".encode())
