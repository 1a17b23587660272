"""Test the table of AllGather on a shared GPU: its measurements, and which targets are reached."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import sp_core as sp
from benchmarks.contests import gpu
from benchmarks.contests.gpu import rows
from benchmarks.machine import ASKED, device, facts
from sp_core import transport
from sp_core.testing import run_threads, session


def launch(ranks: int, **milliseconds: float) -> dict[str, Any]:
    """Make a launch of five rounds. The link moves the whole vector down in 0.25 ms, up in 0.5."""
    samples = {name: [ms * 1e-3] * 5 for name, ms in milliseconds.items()}
    beside = {"down": (0.25, 0.25), "up": (0.5, 0.5), "computation": (2.0, 3.0 * ranks)}
    timed = {
        f"{name}, {who}": [ms * 1e-3] * 5
        for name, both in beside.items()
        for who, ms in zip(("one rank", "all ranks"), both, strict=True)
    }
    return {
        "ranks": ranks,
        "status": "ok",
        "nbytes": 2**24,
        "samples": samples,
        "beside": {**timed, gpu.GATHER: [3e-3] * 5},
        "missing": {"device": "it says no"},
    }


YES, NO = "reached", "not reached"


@pytest.mark.parametrize(
    ("found", "on_gpu", "marks"),
    [
        (launch(2, naive=9, staged=5, pipelined=0.9, ipc=0.18), True, ["", "", YES, YES]),
        (launch(2, pipelined=1.1, ipc=0.23), True, [NO, NO]),
        (launch(4, pipelined=2.1), True, [YES]),  # the link needs 1.5 ms: 71 %
        (launch(4, pipelined=2.2), True, [NO]),
        (launch(2, pipelined=0.1), False, [""]),
    ],
)
def test_what_counts_as_reached(found: dict[str, Any], on_gpu: bool, marks: list[str]) -> None:
    shown = {row[0]: row[-1] for row in rows(found, on_gpu=on_gpu)}
    assert shown == dict(zip(found["samples"], marks, strict=True))


def small(comm: Any) -> dict[str, Any]:
    return gpu.measured(comm, torch.device("cpu"), 4096, side=8, seconds=0.0)


def test_every_way_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ON_CPU", ("host", "window", "ipc"))
    monkeypatch.setattr(gpu, "LEAST_ROUNDS", 2)
    found = run_threads(2, small)[0]
    lengths = {name: len(samples) for name, samples in found["samples"].items()}
    assert lengths == {"naive": 2, "host": 2, "window": 2}
    assert set(found["beside"]) == set(launch(2)["beside"])
    assert "ipc" in found["missing"]["ipc"]
    assert {row[0] for row in rows(found, on_gpu=False)} == {*lengths}
    monkeypatch.setattr(gpu, "naive", lambda world, x: x.new_zeros(world.size * x.numel()))
    with pytest.raises(Exception, match="naive: the gathered numbers are not the ones"):
        run_threads(2, small)


def test_what_is_shown() -> None:
    good = {**launch(2, naive=9, pipelined=0.9), "device": {"name": "a GPU"}}
    shown = str(list(gpu.show({"kind": "cuda", "launches": [good]})))
    for text in ("pipelined", "reached", "device: it says no", "1.50 times as long", "3.000 ms"):
        assert text in shown


@pytest.mark.parametrize(
    ("seen", "share", "numbers"),
    [
        (["a b", "a b"], False, [0, 1]),
        (["a", "b"], False, [0, 0]),  # with `--gpus-per-task` every rank sees one
        (["a", "a"], True, [0, 0]),
        (["a", "a"], False, []),
        (["", ""], True, []),
    ],
)
def test_a_gpu_is_known_by_its_uuid(
    seen: list[str], share: bool, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank of a node takes its own GPU, unless ranks share. The kit does the same."""
    gpus = [names.split() for names in seen]
    uuids = [names[rank % len(names)] if names else None for rank, names in enumerate(gpus)]
    told = [uuid or f"none of rank {rank}" for rank, uuid in enumerate(uuids)]
    local = MagicMock(size=2, **{"allgather.return_value": uuids})
    world = MagicMock(Split_type=lambda kind: local, **{"allgather.return_value": told})

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=gpus[local.rank][device.index])

    monkeypatch.setattr(transport, "count_devices", lambda kind: len(gpus[local.rank]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus[local.rank]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for rank in range(2):
        local.rank = world.rank = rank
        with nullcontext() if numbers else pytest.raises(SystemExit, match="Pass --share-gpu"):
            assert device("cuda", world, share_gpu=share).index == numbers[rank]
        local.allgather.assert_called_with(uuids[rank])
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(rank))
        monkeypatch.setattr(session, "current", session.Session(device="cuda", share_gpu=share))
        session.find_shared_gpu(session.current, world)
        world.allgather.assert_called_with(told[rank])
        with nullcontext() if numbers else pytest.raises(sp.DeviceError, match="--sp-share-gpu"):
            assert session.device().index == numbers[rank]


def test_readings_are_those_of_the_gpu_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may see some GPUs only, in another order than nvidia-smi."""
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\ncase "$*" in *"-i GPU-b") echo 550.1, 1980, 40, 350.5;; esac\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    properties = SimpleNamespace(uuid="b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    world = MagicMock(size=1, rank=0, **{"allgather.return_value": ["b"]})
    found = facts(world, torch.device("cuda", 0), "ipc")["device"]
    assert [found[name] for name in ASKED] == ["550.1", 1980, 40, 350.5]


@pytest.mark.parametrize(("gpus", "count"), [("ab", 2), ("aa", 1)])
def test_a_record_counts_gpus_by_their_uuids(
    gpus: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU numbers would not do, because every node has a GPU 0."""
    properties = SimpleNamespace(uuid=gpus[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    world = MagicMock(size=2, rank=1)
    world.allgather.return_value = list(gpus)
    found = facts(world, torch.device("cuda", 0), "ipc")
    world.allgather.assert_called_once_with(gpus[1])
    assert (found["device"]["count"], found["transport"]["shared_gpu"]) == (count, count < 2)
