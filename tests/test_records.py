"""Test benchmark records: they can be read, a bad line spoils no other; and what machines tell."""

import contextlib
import copy
import functools
import json
import operator
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from kit import records as made
from mpi4py import MPI
from studies.commands import ROOT, program

import sp_core as sp
from benchmarks import machine, records
from benchmarks.cases.setting import NOTHING
from benchmarks.machine import fingerprint
from benchmarks.records import ForeignError, Record
from sp_core import transport
from sp_core.testing import session

PAIR = {"index": 3, "stage": "screen", "side": "base", "slot": 0, "coin": 1, "seed": 7}
RING = made.case("schemes", "ring", "zigzag/causal/forward", 2)
GOOD = made.dicts(
    made.record(RING, 0.5, pair=PAIR, comm={"exchange": {"bytes_sent": 64, "seconds": 0.1}})
)
FAILED = GOOD | NOTHING | {"status": "failed", "reason": "a rank died\nof signal 9"}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return a good record with a different value at `path`."""
    record: dict[str, Any] = copy.deepcopy(GOOD)
    *way, last = path.split(".")
    functools.reduce(operator.getitem, way, record)[last] = value
    return record


def line(record: Any) -> bytes:
    return json.dumps(record).encode()


def as_record(values: Any) -> Record:
    return records.parse(line(values))


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("schema", 2, "$.schema"),
        ("schema", True, "$.schema"),
        ("status", "fine", "$.status"),
        ("status", "failed", "$.reason"),
        ("timing", None, "$.timing"),
        ("timing.samples_s", [], "$.timing.samples_s"),
        ("timing.samples_s", [0.5], "has 1 numbers, the record says 3"),
        ("timing.samples_s", [0.5, 0.5, -0.5], "$.timing.samples_s[2]"),
        ("timing.samples_s", [0.5, 0.5, True], "$.timing.samples_s[2]"),
        ("timing.median_s", 0.4, "the median of the samples is 0.5"),
        ("timing.per_rank_median_s", [0.5], "has 1 numbers, the record says 2"),
        ("case.ranks", 2.0, "$.case.ranks"),
        ("case.ranks", 0, "$.case.ranks"),
        ("case.ranks", 1, "has not 1 ranks"),
        ("case.id", "schemes/<script>", "$.case.id"),
        ("case.id", "schemes/ring\n", "$.case.id"),
        ("case.id", "a|b", "$.case.id"),
        ("case.id", "a" * 5000, "$.case.id"),
        ("device.name", "a\nb", "$.device.name"),
        ("device.name", "a\x1b[31m", "$.device.name"),
        ("device.name", "\ud800", "no JSON"),
        ("comm.exchange.bytes_sent", 1.5, ".bytes_sent"),
        ("comm.exchange.bytes_sent", 10**19, ".bytes_sent"),
        ("phases", {}, "$.phases"),
        ("reason", "x" * 5000, "$.reason"),
    ],
)
def test_a_wrong_value_is_named(path: str, value: Any, complaint: str, tmp_path: Path) -> None:
    record = changed(path, value)
    with pytest.raises(ForeignError, match=r".") as caught:
        records.parse(line(record))
    told = str(caught.value)
    assert (complaint in told, "\n" in told, len(told) < 400) == (True, False, True)
    with pytest.raises(ForeignError):
        records.append(tmp_path / "records.jsonl", record)
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        *((line({n: GOOD[n] for n in GOOD if n != name}), f"`{name}`") for name in GOOD),
        (b"[]", "Expected `object`"),
        (b"null", "Expected `object`"),
        (b"PK\x03\x04\xff\xfe", "no JSON"),
        (line(GOOD)[:-30], "no JSON"),
        (line(GOOD).replace(b'"launch": 0', b'"launch": NaN'), "no JSON"),
        (line(GOOD).replace(b'"launch": 0', b'"launch": -Infinity'), "no JSON"),
        (line(GOOD).replace(b'"median_s": 0.5', b'"median_s": 1e999'), "out of range"),
        (line(GOOD).replace(b'"launch": 0', b'"launch": ' + b"9" * 9000), "$.launch"),
        (b"[" * 100_000, "Expected `object`"),
        (b'{"x":' * 100_000, "no JSON"),
        (b'{"schema":1,"x":"' + b"x" * records.MAX_LINE + b'"}', f"{records.MAX_LINE} are allowed"),
    ],
)
def test_a_bad_line_is_named_and_the_rest_is_usable(
    raw: bytes, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"\n".join([line(GOOD), raw, b"", line(FAILED)]) + b"\n")
    found = records.read(path)
    assert found.records == [as_record(GOOD), as_record(FAILED)]
    assert len(found.problems) == 1
    assert re.fullmatch(f"{path}, line 2: .*{re.escape(complaint)}.*", found.problems[0])


@settings(max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 2000), st.integers(0, 2000))
def test_no_bytes_raise_anything_but_a_record_error(noise: bytes, start: int, length: int) -> None:
    good = line(GOOD)
    spoiled = good[:start] + noise + good[start + length :]
    with contextlib.suppress(ForeignError):
        records.parse(spoiled)


def test_a_file_that_cannot_be_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(line(GOOD) * 3)
    monkeypatch.setattr("benchmarks.records.MAX_BYTES", 100)
    told = {"absent": "No such file", ".": "no ordinary", "pipe": "no ordinary", "large": "Split"}
    for name, complaint in told.items():
        found = records.read(tmp_path / name)
        assert (found.records, len(found.problems)) == ([], 1)
        assert re.match(f"{tmp_path}.*{complaint}", found.problems[0])


def test_a_line_that_was_cut_by_the_death_of_its_writer_costs_only_itself(tmp_path: Path) -> None:
    """SIGKILL ends the writer in its second line: no handler runs, and nothing is flushed."""
    path = tmp_path / "records.jsonl"
    program = (
        "import json, os, signal, sys\nfrom benchmarks import records\n"
        "records.append(sys.argv[1], json.loads(sys.argv[2]))\n"
        "open(sys.argv[1], 'ab', buffering=0).write(sys.argv[2][:100].encode())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, str(path), line(GOOD).decode()]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == -9
    for record in (FAILED, GOOD):
        records.append(path, record)
    found = records.read(path)
    assert found.records == [as_record(GOOD), as_record(FAILED), as_record(GOOD)]
    assert [problem.split(":")[0] for problem in found.problems] == [f"{path}, line 2"]
    assert path.read_bytes().count(b"\n") == 4


@pytest.mark.parametrize(
    ("part", "name", "value", "same"),
    [
        ("env", "slurm_job", "4711", True),
        ("env", "fingerprint", "f" * 16, True),
        ("device", "temperature", 80, True),
        ("device", "clocks", "1980 MHz", True),
        ("device", "count", 4, True),
        ("transport", "oversubscribed", True, True),
        ("env", "torch", "2.14.0", False),
        ("env", "cores", 4, False),
        ("device", "name", "another CPU", False),
        ("device", "power_cap", 700, False),
        ("transport", "threads", 2, False),
        ("transport", "mpi", {"vendor": "MPICH", "version": "5.0.2", "library": "MPICH"}, False),
    ],
)
def test_the_fingerprint_holds_stable_fields_only(
    part: str, name: str, value: Any, same: bool
) -> None:
    pair = (changed(f"{part}.{name}", value), GOOD)
    one, other = (fingerprint(made["env"], made["device"], made["transport"]) for made in pair)
    assert (one == other) is same


@pytest.mark.parametrize(
    "told",
    ["", "\x1b[31mred\x1b[0m\x00\x07", "\ud800", "x" * 9000, "tab\there\nline", "\u2028\x85"],
)
def test_any_text_can_be_a_reason(told: str) -> None:
    records.parse(line(changed("status", "failed") | {"reason": records.reason(told)}))


def test_a_busy_machine_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interval the CPU works for 30 ticks, and is idle or waits for 70."""
    stat, later = tmp_path / "stat", "cpu  130 0 0 340 30 0 0 0 0 0\n"
    monkeypatch.setattr(machine, "_STAT", stat)
    monkeypatch.setattr("benchmarks.machine.time.sleep", lambda _: stat.write_text(later))
    stat.write_text("cpu  100 0 0 300 0 0 0 0 0 0\n")
    assert machine.busy_share() == pytest.approx(0.3)
    monkeypatch.setattr(machine, "_STAT", tmp_path / "absent")
    assert machine.busy_share() == 0.0


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
    seen: list[str],
    share: bool,
    numbers: list[int],
    monkeypatch: pytest.MonkeyPatch,
    substitute: Any,
) -> None:
    """Each rank of a node takes its own GPU, unless ranks share. The kit does the same."""
    gpus = [names.split() for names in seen]
    uuids = [names[rank % len(names)] if names else None for rank, names in enumerate(gpus)]
    told = [uuid or f"none of rank {rank}" for rank, uuid in enumerate(uuids)]
    fine, local = contextlib.nullcontext(), MagicMock(size=2, **{"allgather.return_value": uuids})
    world = MagicMock(Split_type=lambda kind: local, **{"allgather.return_value": told})

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=gpus[local.rank][device.index])

    monkeypatch.setattr(transport, "count_devices", lambda kind: len(gpus[local.rank]))
    substitute(
        torch.cuda,
        device_count=lambda: len(gpus[local.rank]),
        get_device_properties=properties,
        set_device=lambda device: None,
    )
    for rank in range(2):
        local.rank = world.rank = rank
        with fine if numbers else pytest.raises(SystemExit, match="Pass --share-gpu"):
            assert machine.device("cuda", world, share_gpu=share).index == numbers[rank]
        local.allgather.assert_called_with(uuids[rank])
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(rank))
        monkeypatch.setattr(session, "current", session.Session(device="cuda", share_gpu=share))
        session.find_shared_gpu(session.current, world)
        world.allgather.assert_called_with(told[rank])
        with fine if numbers else pytest.raises(sp.DeviceError, match="--sp-share-gpu"):
            assert session.device().index == numbers[rank]


@pytest.mark.parametrize(
    ("bound", "threads", "crowded"),
    [
        ([{0}, {1}], 1, False),
        ([{0}, {0}], 1, True),
        ([{0, 1}] * 2, 1, False),
        ([{0, 1, 2}] * 3, 1, True),
    ],
    ids=["a core each", "one core", "two cores", "a quota of two cores"],
)
def test_a_node_is_oversubscribed_by_the_threads_of_its_ranks_on_the_cores_of_all(
    bound: list[set[int]], threads: int, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may bind each rank to other cores; ranks of other nodes do not count."""
    monkeypatch.setattr(machine, "node_cores", lambda: 2)
    node = MagicMock(**{"allgather.return_value": [(threads, cores) for cores in bound]})
    world = MagicMock(size=8, **{"allreduce.side_effect": lambda mine, op: mine})
    world.Split_type.return_value = node
    assert machine.is_crowded(world, threads) is crowded
    world.allreduce.side_effect = lambda mine, op: True  # as on another node
    assert machine.is_crowded(world, threads)


@pytest.mark.parametrize(("gpus", "count"), [("ab", 2), ("bb", 1)])
@pytest.mark.parametrize(
    ("said", "readings"),
    [
        ("550.1, 1980, 40, 350.5", ["550.1", 1980, 40, 350.5]),
        ("No devices were found", [None] * 4),
    ],
)
def test_a_record_counts_gpus_by_their_uuids_and_has_readings_of_the_one_that_is_used(
    said: str,
    readings: list[Any],
    gpus: str,
    count: int,
    tmp_path: Path,
    monkeypatch: Any,
    substitute: Any,
) -> None:
    """Every node has a GPU 0. A process may see some only, in another order than nvidia-smi."""
    program(tmp_path / "nvidia-smi", f'case "$*" in *"-i GPU-b") echo "{said}";; esac')
    monkeypatch.setenv("PATH", str(tmp_path))
    substitute(
        torch.cuda,
        get_device_properties=lambda _: SimpleNamespace(uuid="b"),
        get_device_name=lambda device: "a GPU",
    )
    substitute(MPI, Get_library_version=lambda: "MPICH Version:\t4.1.2\nMPICH Release date:\t?")
    world = MagicMock(size=2, rank=0, **{"allgather.return_value": list(gpus)})
    found = machine.facts(world, torch.device("cuda", 0), "ipc")
    world.allgather.assert_called_once_with("b")
    assert (found["device"]["count"], found["transport"]["shared_gpu"]) == (count, count < 2)
    assert [found["device"][name] for name in machine.ASKED] == readings
    assert found["transport"]["mpi"]["library"] == "MPICH Version: 4.1.2"  # a record takes no tab
