"""Test files of measured constants: how they are found, written, read and refused."""

import json
import math
import os
import pwd
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from oracle.tunings import PLAIN, drawn, timed

import sp_core as sp
from sp_core import measuring, mesh as mesh_module
from sp_core.mesh import fingerprint
from sp_core.testing import run_threads, spmd
from sp_core.tuning import (
    FileError,
    default_path,
    find,
    latest,
    load,
    predict,
    save,
)


def test_constants_survive_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "made" / "here"
    monkeypatch.setenv("SP_TUNING_DIR", str(folder))
    assert default_path({"host": "here"}) == folder / "tuning-9ba0a53efaac93e1.json"  # b2sum -l 64
    known = replace(
        drawn(3),
        fingerprint={"host": "here", "mpi": "x"},
        bind=(1e-6, 2e-6),
        error=(0.1, 0.2),
        measured_at="2026",
    )
    path = default_path(known.fingerprint)
    save(known, path)
    assert {**vars(load(path, known.fingerprint))} == {**vars(known)}
    assert list(folder.iterdir()) == [path]
    (folder / "any").touch()
    assert path.stat().st_mode == (folder / "any").stat().st_mode  # others may read it, too
    (folder / "tuning-0.json").write_text("damaged")
    for year, mpi in (("2025", "y"), ("2027", "v"), ("2024", "w")):
        other = replace(known, fingerprint={"host": "here", "mpi": mpi}, measured_at=year)
        save(other, default_path(other.fingerprint))
    newest = latest("here")
    assert newest is not None
    assert newest.measured_at == "2027"
    assert latest("elsewhere") is None
    monkeypatch.setenv("SP_TUNING", "auto")
    assert find(lambda: known.fingerprint) is not None
    assert find(lambda: {"host": "other"}) is None
    assert find(lambda: known.fingerprint, "off") is None
    monkeypatch.setenv("SP_TUNING", "off")
    assert find(lambda: known.fingerprint) is None
    assert find(lambda: known.fingerprint, "auto") is not None  # the argument counts


@pytest.mark.parametrize("error", [OSError("no room"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_fails_leaves_what_was_there(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning-1.json"
    save(drawn(1), path)
    before = path.read_text()

    monkeypatch.setattr(os, "replace", Mock(side_effect=error))
    with pytest.raises(type(error)):
        save(drawn(2), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def changed(change: dict[str, Any]) -> str:
    return json.dumps({**json.loads(GOOD), **change})


GOOD = json.dumps(
    {
        "schema_version": 1,
        "fingerprint": {"host": "here"},
        "nodes": [0, 0],
        "links": {"node": {"points": [[1, 1.0]]}},
        "add": {"points": [[1, 1.0]]},
        "copy": {"points": [[1, 1.0]]},
        "start": 0.0,
        "bind": [0, 0],
        "times": {"all_reduce": {"ring": {"points": [[1, 1.0]]}}},
        "error": [0, 0],
        "measured_at": "",
    }
)
BROKEN = {
    "cannot be read": "{",
    "version None": "[]",
    "version 0": changed({"schema_version": 0}),
    "damaged": changed({"add": 3}),
    "curve": changed({"add": {"points": [[1, -1.0]]}}),
    "nodes of at least one rank": changed({"nodes": []}),
    "another machine": changed({"fingerprint": {"host": "there"}}),
}


@pytest.mark.parametrize("reason", sorted(BROKEN))
def test_a_file_that_cannot_be_used_says_why(reason: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(GOOD)
    load(path, {"host": "here"})
    path.write_text(BROKEN[reason])
    with pytest.raises(FileError, match=reason):
        load(path, {"host": "here"})


def everywhere(found: Any, value: object) -> Iterator[Any]:
    """Yield copies of a JSON value, each with `value` in another place."""
    yield value
    for key in (
        found if isinstance(found, dict) else range(len(found) if isinstance(found, list) else 0)
    ):
        for part in everywhere(found[key], value):
            copy = deepcopy(found)
            copy[key] = part
            yield copy


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "-1",
        "1e999",
        "NaN",
        "1" * 400,
        "2.5",
        '"2.5"',
        '"x"',
        "[]",
        "{}",
        "[" * 10**5 + "]" * 10**5,
    ],
    ids=lambda text: text[:9],
)
def test_a_file_with_any_value_anywhere_is_refused_or_gives_numbers(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SP_TUNING_DIR", str(tmp_path))
    path = default_path({"host": "here"})
    for found in everywhere(json.loads(GOOD), "@"):
        path.write_text(json.dumps(found).replace('"@"', text))
        try:
            tuning = load(path)
        except FileError:
            assert find(lambda: {"host": "here"}) is None
            assert latest("here") is None
            continue
        numbers = [tuning.alpha, tuning.beta, tuning.start, *tuning.bind, *tuning.error]
        assert all(0 <= number < math.inf for number in numbers), path.read_text()
        assert predict(tuning, "all_reduce", "ring", (0, 0), 64) < math.inf


def test_a_user_without_a_home_folder_has_no_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a user has no HOME and no entry in the list of users, as in many containers."""
    for name in ("HOME", "XDG_CACHE_HOME", "SP_TUNING_DIR", "SP_TUNING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError("uid not found")))
    monkeypatch.chdir(tmp_path)

    def body(comm: Any) -> None:
        with sp.Mesh(comm, sp=comm.size) as mesh:
            assert mesh.tuning is None
        with pytest.raises(FileError, match=r"home folder.* Set SP_TUNING_DIR to a folder"):
            measuring.keep(comm)

    run_threads(2, body)
    assert latest("here") is None
    there, text = measuring.told()
    assert (there, "Set SP_TUNING_DIR to a folder" in text) == (False, True)
    assert not [*tmp_path.iterdir()]
    monkeypatch.setenv("SP_TUNING_DIR", str(tmp_path))
    assert default_path({}).parent == tmp_path


@spmd(2)
def test_the_environment_names_a_file(
    comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.json"
    save(timed({"all_reduce": {"mpi": 1.0, "ring": 0.1}}), path)
    monkeypatch.setenv("SP_TUNING", str(path))
    with sp.Mesh(comm, sp=comm.size) as mesh:
        assert sp.plan("all_reduce", torch.ones(4), comm=mesh["sp"]).algorithm == "ring"


@pytest.mark.parametrize(
    ("name", "told"), [("node_name", "other"), ("cpu_model", "other"), ("node_cores", 0)]
)
def test_a_machine_is_known_by_its_host_processor_and_cores(
    name: str, told: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many of the cores this process may use does not count."""
    here = fingerprint()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert fingerprint() == here
    monkeypatch.setattr(mesh_module, name, lambda: told)
    assert fingerprint() != here


def test_the_doctor_says_what_auto_decides_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SP_TUNING may name constants of another machine, or none. A name may be too long."""
    monkeypatch.setenv("SP_TUNING_DIR", str(tmp_path))
    monkeypatch.delenv("SP_TUNING", raising=False)
    path, mine = default_path(fingerprint()), tmp_path / "mine.json"
    known = replace(PLAIN, fingerprint=fingerprint(), error=(0.25, 0.5))
    save(PLAIN, mine)
    for prepare, usable_, texts in (
        (str, False, ("none: ", "no such file", "doctor --measure")),
        (partial(path.write_text, "{"), False, (f"^{path} cannot be read",)),
        (partial(save, known, path), True, ("1/beta 10.0 GB/s", "25% (median) or 50%")),
        (partial(monkeypatch.setenv, "SP_TUNING", "off"), False, ("off, by SP_TUNING; ",)),
        (partial(monkeypatch.setenv, "SP_TUNING", str(mine)), True, (str(mine),)),
        (mine.unlink, False, (f"^{mine}: there is no such file$",)),
        (partial(monkeypatch.setenv, "SP_TUNING", "auto"), True, (str(path),)),
        (partial(monkeypatch.setenv, "SP_TUNING_DIR", "x" * 300), False, ("cannot be read",)),
    ):
        prepare()
        there, text = measuring.told()
        assert there == usable_
        assert [part in f"^{text}$" for part in texts] == [True] * len(texts)
    assert latest("here") is None


def test_variables_name_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for named, folder in (("", tmp_path / "sp_core"), (str(tmp_path / "own"), tmp_path / "own")):
        monkeypatch.setenv("SP_TUNING_DIR", named)
        monkeypatch.setenv("SP_TUNING", "")
        save(replace(PLAIN, fingerprint={"host": "x"}), default_path({"host": "x"}))
        assert [path.parent for path in folder.glob("*.json")] == [folder]
        assert find(lambda: {"host": "x"}) is not None


def test_an_error_names_the_variable_that_chose_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SP_TUNING", str(tmp_path / "none"))
    with pytest.raises(FileError, match="none: there is no such file; SP_TUNING names it"):
        find(dict)
    with pytest.raises(FileError, match=r"no such file$"):
        find(dict, tmp_path / "none")
