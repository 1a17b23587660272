"""The emulated cluster without root: its plan, what is cleaned up, its wires and its rows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import sp_core as sp
from benchmarks import launching
from benchmarks.contests.netlab import __main__ as program, hosts
from benchmarks.contests.netlab.__main__ import SETTINGS, Hosted, netlab, rows
from benchmarks.contests.netlab.hosts import Plan
from benchmarks.contests.netlab.measure import check_all
from benchmarks.contests.netlab.switch import Wires
from sp_core.schedules import ALGORITHMS
from sp_core.testing import run_threads


@pytest.mark.parametrize("library", [True, False])
def test_what_hosts_check_is_what_they_have(library: bool) -> None:
    """Hosts share no memory, and the model of a link carries no collective of the library."""

    def body(world: Any) -> int:
        with sp.Mesh(world, hosts=world.size, ranks=1) as mesh:
            return check_all(mesh["hosts", "ranks"], library=library)

    absent = ("window",) if library else ("window", "auto", "mpi")
    assert set(run_threads(2, body)) == {
        sum(name not in absent for names in ALGORITHMS.values() for name in names)
    }


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands that would have been run; the namespaces belong to three runs and to others."""
    found: list[str] = []
    there = "spnl1h0 (id: 3)\nspnl1sw\nspnl12h0\nspnl12h1 (id: 0)\nspnl1home\nother\n"

    def run(command: str) -> subprocess.CompletedProcess[str]:
        found.append(command)
        said = there if command == "ip netns list" else ""
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(hosts, "_ran", run)
    return found


def removed(commands: list[str]) -> list[str]:
    """The namespaces that commands remove."""
    return [command.split()[3] for command in commands if "netns del" in command]


@given(pid=st.integers(1, 4_194_304), count=st.integers(1, 64), delay=st.sampled_from([0.0, 1e-3]))
def test_names_fit_the_kernel_and_addresses_are_apart(pid: int, count: int, delay: float) -> None:
    plan = Plan(f"spnl{pid}", count, 1e9, delay)
    assert len({plan.address(name) for name in plan.names}) == count
    assert all(len(plan.tun(name)) <= 15 for name in plan.names)
    assert all(name.startswith(plan.prefix) for name in plan.namespaces)
    assert all(f"{plan.address(name)} {name}\n" in plan.hosts_file() for name in plan.names)


@pytest.mark.parametrize("delay", [0.0, 1e-3])
def test_commands_touch_only_what_the_plan_has_made(delay: float) -> None:
    plan = Plan("spnl7", 3, 1e9, delay)
    made: set[str] = set()
    for command in map(str.split, plan.commands()):
        if command[:3] == ["ip", "netns", "add"]:
            made.add(command[3])
        else:
            assert command[1] == "-n" or command[:5] == ["ip", "link", "set", command[3], "netns"]
            assert command[2 if command[1] == "-n" else 5] in made
    assert made == set(plan.namespaces)
    shaped = [command for command in plan.commands() if "tbf rate 1000000000bit" in command]
    assert len(shaped) == (0 if delay else 6)  # both ends of every link


def test_only_namespaces_of_that_very_run_are_removed(ran: list[str]) -> None:
    hosts.remove("spnl1")
    assert removed(ran) == ["spnl1h0", "spnl1sw"]


def test_what_a_killed_run_has_left_goes_and_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process in the name of a folder tells whether its maker lives."""
    alive = f"spnl{os.getpid()}"
    for name in ("spnl4194304", alive, "unrelated"):  # above the greatest pid of Linux
        (tmp_path / name).mkdir()
    gone: list[str] = []
    monkeypatch.setattr(hosts, "remove", gone.append)
    assert hosts.remove_stale(tmp_path) == gone == ["spnl4194304"]
    assert {path.name for path in tmp_path.iterdir()} == {alive, "unrelated"}


def test_hosts_are_taken_down_when_bringing_them_up_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def run(command: str) -> subprocess.CompletedProcess[str]:
        done.append(command)
        made = next((c.split()[3] for c in done if "netns add" in c), "")
        listed = made if command == "ip netns list" else ""
        return subprocess.CompletedProcess(command, int("tbf" in command), listed, "no such qdisc")

    monkeypatch.setattr(hosts, "_ran", run)
    monkeypatch.setattr(hosts, "check_system", lambda: None)
    with (
        pytest.raises(hosts.NetlabError, match=r"tc -n .* tbf .*: no such qdisc"),
        hosts.cluster(2, 1e9, 0.0, tmp_path),
    ):
        raise AssertionError("the block must not begin")
    assert removed(done) == [done[0].split()[3]]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(hosts.NetlabError, match=r"ip, tc.* not found.*Install .*iproute2"):
        hosts.check_system()


def test_root_without_namespaces_is_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not fall back to the model."""

    def refuse() -> None:
        raise hosts.NetlabError("no namespaces here")

    monkeypatch.setattr(program, "check_system", refuse)
    monkeypatch.setattr(Hosted, "once", lambda entry: pytest.fail("ranks were started"))
    monkeypatch.setattr("benchmarks.contests.netlab.__main__.os.geteuid", lambda: 0)
    assert netlab([]) == 2
    assert "no namespaces here" in capsys.readouterr().err


def test_without_root_the_output_says_that_the_link_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher's own failure is tried again, once; hosts that fail make the launch fail."""
    failed = {"status": "failed", "reason": "exit code 3", "output": "demux engine error"}
    seconds = {"stream": [0.1], "segmented_ring": [0.1]}
    answers = [failed, failed, failed, {"status": "ok", "seconds": seconds}]
    launched: list[Any] = []

    def run(ranks: int, measure: str, setting: Any, launch: object) -> Any:
        launched.append(setting)
        return answers.pop(0)

    monkeypatch.setattr("benchmarks.contests.netlab.__main__.os.geteuid", lambda: 1000)
    monkeypatch.setattr(launching, "run", run)
    monkeypatch.setattr(program, "installed", lambda: "mpich")
    out = tmp_path / "out.json"
    assert netlab(["--only", "16 MiB, P", "--out", str(out)]) == 1  # a failed launch is red
    assert "link model inside the transport" in capsys.readouterr().out
    assert [setting.name for setting in launched] == ["16 MiB, P = 2"] * 2 + ["16 MiB, P = 3"] * 2
    assert all(setting.modelled for setting in launched)
    assert "link model" in out.read_text()

    def broken(entry: Hosted) -> Any:
        raise hosts.NetlabError("tc failed")

    monkeypatch.setattr(Hosted, "once", broken)
    entry = Hosted("one", 2, "", SETTINGS[0])
    assert entry.run() == {"status": "failed", "reason": "tc failed"}


@given(sizes=st.lists(st.integers(20, 16_000), min_size=1, max_size=20))
def test_packets_take_turns_on_a_wire(sizes: list[int]) -> None:
    """All bits one after the other, then the delay. The other way nothing is in the way."""
    wires = Wires(1e8, 1e-3)
    arrivals = [wires.arrival(5.0, 0, 1, n) for n in sizes]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(5 + 1e-3 + sum(sizes) / 1e8, abs=1e-9)
    assert wires.arrival(5.0, 1, 0, 100) == pytest.approx(5 + 1e-3 + 1e-6, abs=1e-9)


@given(sizes=st.lists(st.integers(20, 16_000), min_size=1, max_size=20), one_sender=st.booleans())
def test_a_host_has_one_wire_for_all_the_others(sizes: list[int], one_sender: bool) -> None:
    """Packets to different hosts, or from them, pass one after the other."""
    wires = Wires(1e8, 1e-3)
    ends = [(0, k + 1) if one_sender else (k + 1, 0) for k in range(len(sizes))]
    arrivals = [
        wires.arrival(5.0, source, dest, n) for (source, dest), n in zip(ends, sizes, strict=True)
    ]
    assert max(arrivals) == pytest.approx(5 + 1e-3 + sum(sizes) / 1e8, abs=1e-9)


def test_mpis_are_started_by_the_agent_on_every_host() -> None:
    for mpi in ("mpich", "openmpi"):
        found = program.across(mpi, "/x/agent.sh", ["h0", "h1"], 2)
        assert {"/x/agent.sh", "h0:2,h1:2"} <= set(found)


def marks(launches: dict[str, dict[str, object]]) -> dict[str, str]:
    return {row.text: row.mark for row in rows(launches)}


@pytest.mark.parametrize(("ours", "mark"), [(0.104, "reached"), (0.106, "not reached")])
def test_a_row_is_judged_by_the_stream_of_its_own_round(ours: float, mark: str) -> None:
    """With P = 2 the vector goes through the link once: as long as the stream of that round."""
    seconds = {
        "stream": [0.1 * k for k in range(1, 9)],
        "segmented_ring": [ours * k for k in range(1, 9)],
        "library": [1.0] * 8,
    }
    found = marks({"16 MiB, P = 2": {"seconds": seconds}})
    assert found.pop("all_reduce 16 MiB, P = 2: time / (2(P-1)/P n/B)") == mark
    assert set(found.values()) == {"not measured"}


def test_rows_of_all_launches() -> None:
    stream = [0.1] * 8
    launches = {
        "16 MiB, P = 3": {
            "seconds": {"stream": stream, "segmented_ring": [0.15] * 8, "library": [0.30] * 8}
        },
        "64 KiB, 1 ms, P = 4": {
            "seconds": {"stream": stream, "recursive_doubling": [0.1] * 8, "library": [0.3] * 8}
        },
        "16 MiB, 2 x 2": {"seconds": {"stream": stream, "hierarchical": [0.105] * 8}},
        "ring attention, P = 2": {
            "seconds": {"both": [1.1] * 8, "compute": [1.0] * 8, "communication": [0.5] * 8}
        },
    }
    found = {
        row.text: (row.mark, row.found and round(row.found.median, 3)) for row in rows(launches)
    }
    assert found == {
        "all_reduce 16 MiB, P = 2: time / (2(P-1)/P n/B)": ("not measured", None),
        "all_reduce 16 MiB, P = 3: time / (2(P-1)/P n/B)": ("not reached", 1.125),
        "all_reduce 16 MiB, P = 3: library / segmented_ring": ("not reached", 2.0),
        "all_reduce 1 KiB, 1 ms, P = 4: library / recursive_doubling": ("not measured", None),
        "all_reduce 64 KiB, 1 ms, P = 4: library / recursive_doubling": ("reached", 3.0),
        "all_reduce 16 MiB, 2 x 2: (n/B) / hierarchical": ("reached", 0.952),
        "ring attention: share of the communication that is hidden": ("not reached", 0.8),
    }
