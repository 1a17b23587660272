"""The emulated cluster without root: its plan, what is cleaned up and what is not, its wires, and what its rows say."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sp_core as sp
from benchmarks.contests.netlab import __main__ as netlab
from benchmarks.contests.netlab import hosts, starting
from benchmarks.contests.netlab.hosts import Link, Plan
from benchmarks.contests.netlab.measure import check_all
from benchmarks.contests.netlab.setting import SETTINGS, Setting, rows
from benchmarks.contests.netlab.switch import Wires
from sp_core.schedules import ALGORITHMS
from sp_core.testing import run_threads

Commands = list[tuple[str, ...]]


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
def ran(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Commands that would have been run; the namespaces that there are belong to three runs and to somebody else."""
    found: Commands = []
    there = "spnl1h0 (id: 3)\nspnl1sw\nspnl12h0\nspnl12h1 (id: 0)\nspnl1home\nother\n"

    def run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        found.append(command)
        return subprocess.CompletedProcess(
            command, 0, there if command == ("ip", "netns", "list") else "", ""
        )

    monkeypatch.setattr(hosts, "_ran", run)
    return found


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("1gbit", Link(1e9)),
        ("100mbit,1ms", Link(1e8, 1e-3)),
        ("2.5gbit,50us", Link(2.5e9, 5e-5)),
        ("64kbit,1s", Link(6.4e4, 1.0)),
    ],
)
def test_a_link_is_read(text: str, link: Link) -> None:
    found = Link.parse(text)
    assert (found.rate, found.delay) == pytest.approx((link.rate, link.delay))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "gbit",
        "1gbit,",
        "1gbit,1",
        "1 gbit",
        "-1gbit",
        "1gbit,1ms,2ms",
        "0gbit",
        "1..2gbit",
    ],
)
def test_a_link_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="pass a"):
        Link.parse(text)


@given(pid=st.integers(1, 4_194_304), count=st.integers(1, 64), delay=st.sampled_from([0.0, 1e-3]))
def test_names_fit_the_kernel_and_addresses_are_apart(pid: int, count: int, delay: float) -> None:
    plan = Plan(f"spnl{pid}", count, Link(1e9, delay))
    assert len({plan.address(name) for name in plan.names}) == count
    assert all(len(plan.tun(name)) <= 15 for name in plan.names)
    assert all(name.startswith(plan.prefix) for name in plan.namespaces)
    assert all(f"{plan.address(name)} {name}\n" in plan.hosts_file() for name in plan.names)


@pytest.mark.parametrize("delay", [0.0, 1e-3])
def test_commands_touch_only_what_the_plan_has_made(delay: float) -> None:
    plan = Plan("spnl7", 3, Link(1e9, delay))
    made: set[str] = set()
    for command in plan.commands():
        if command[:3] == ("ip", "netns", "add"):
            made.add(command[3])
        else:
            assert command[1] == "-n" or command[:5] == ("ip", "link", "set", command[3], "netns")
            assert command[2 if command[1] == "-n" else 5] in made
    assert made == set(plan.namespaces)
    shaped = [command for command in plan.commands() if "tbf" in command]
    assert len(shaped) == (0 if delay else 6)  # both ends of every link


@pytest.mark.parametrize("count", [0, 65])
def test_a_cluster_of_no_or_too_many_hosts_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="pass 1 to 64"):
        Plan("spnl1", count, Link(1e9))


def test_only_namespaces_of_that_very_run_are_removed(ran: Commands) -> None:
    hosts.remove("spnl1")
    assert [command[3] for command in ran if command[2] == "del"] == ["spnl1h0", "spnl1sw"]


def test_what_a_killed_run_has_left_goes_and_a_living_one_stays(
    tmp_path: Path, ran: Commands
) -> None:
    """The lock of a folder tells whether its maker lives."""
    for name in ("spnl1", "spnl12", "unrelated"):
        (tmp_path / name).mkdir()
    with hosts._held(tmp_path / "spnl12") as ours:
        assert ours
        assert hosts.remove_stale(tmp_path) == ["spnl1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spnl12", "unrelated"]
    assert hosts.remove_stale(tmp_path) == ["spnl12"]
    assert [command[3] for command in ran if command[2] == "del"] == [
        "spnl1h0",
        "spnl1sw",
        "spnl12h0",
        "spnl12h1",
    ]


def test_hosts_are_taken_down_when_bringing_them_up_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: Commands = []

    def run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        done.append(command)
        fails = "tbf" in command
        prefix = next((c[3][:-2] for c in done if c[:3] == ("ip", "netns", "add")), "")
        return subprocess.CompletedProcess(
            command, int(fails), f"{prefix}sw\n" if command[-1] == "list" else "", "no such qdisc"
        )

    monkeypatch.setattr(hosts, "_ran", run)
    monkeypatch.setattr(hosts, "check_system", lambda: None)
    with (
        pytest.raises(hosts.NetlabError, match=r"tc -n .* tbf .*: no such qdisc"),
        hosts.cluster(2, Link(1e9), tmp_path),
    ):
        raise AssertionError("the block must not begin")
    assert done[-1][:3] == ("ip", "netns", "del")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(hosts.NetlabError, match=r"ip, tc.* not found.*Install .*iproute2"):
        hosts.check_system()


def test_root_without_namespaces_is_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not fall back to the model; somebody else than root gets the model and is told."""

    def refuse() -> None:
        raise hosts.NetlabError("no namespaces here")

    monkeypatch.setattr(netlab, "check_system", refuse)
    monkeypatch.setattr(starting.Hosted, "once", lambda entry: pytest.fail("ranks were started"))
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 0)
    assert netlab.netlab([]) == 1
    assert "no namespaces here" in capsys.readouterr().out


def test_without_root_the_output_says_that_the_link_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched: list[Setting] = []

    def run(entry: starting.Hosted) -> dict[str, object]:
        launched.append(entry.setting)
        return {
            "status": "failed",
            "reason": "exit code 3",
            "output": "demux engine error" if len(launched) == 1 else "wrong",
        }

    monkeypatch.setattr(netlab.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(starting.Hosted, "once", run)
    monkeypatch.setattr(starting, "installed", lambda: "mpich")
    assert (
        netlab.netlab(["--only", "P = 3", "--out", str(tmp_path / "out.json")]) == 1
    )  # a failed launch is red
    assert "link model inside the transport" in capsys.readouterr().out
    assert [setting.name for setting in launched] == [
        "16 MiB, P = 3"
    ] * 2  # the launcher's own failure is tried again, once
    assert all(setting.modelled for setting in launched)
    assert "link model" in (tmp_path / "out.json").read_text()


@given(sizes=st.lists(st.integers(20, 16_000), min_size=1, max_size=20))
def test_packets_take_turns_on_a_wire(sizes: list[int]) -> None:
    """Between two hosts: all bits one after the other, then the delay. The other way nothing is in the way."""
    wires = Wires(1e8, 1e-3)
    arrivals = [wires.arrival(5.0, 0, 1, n) for n in sizes]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(5 + 1e-3 + sum(sizes) / 1e8, abs=1e-9)
    assert wires.arrival(5.0, 1, 0, 100) == pytest.approx(5 + 1e-3 + 1e-6, abs=1e-9)


@given(sizes=st.lists(st.integers(20, 16_000), min_size=1, max_size=20), one_sender=st.booleans())
def test_a_host_has_one_wire_for_all_the_others(sizes: list[int], one_sender: bool) -> None:
    """Packets to different hosts leave one after the other; those of different hosts come in one after the other."""
    wires = Wires(1e8, 1e-3)
    ends = [(0, k + 1) if one_sender else (k + 1, 0) for k in range(len(sizes))]
    arrivals = [
        wires.arrival(5.0, source, dest, n) for (source, dest), n in zip(ends, sizes, strict=True)
    ]
    assert max(arrivals) == pytest.approx(5 + 1e-3 + sum(sizes) / 1e8, abs=1e-9)


def test_mpis_are_started_by_the_agent_on_every_host() -> None:
    for mpi in ("mpich", "openmpi"):
        line = shlex.join(starting.across(mpi, Path("/x/agent.sh"), ["h0", "h1"], 2))
        assert "/x/agent.sh" in line
        assert "h0:2,h1:2" in line


def marks(launches: dict[str, dict[str, object]]) -> dict[str, str]:
    return {row.text: row.mark for row in rows(launches)}


@pytest.mark.parametrize(("ours", "mark"), [(0.104, "reached"), (0.106, "not reached")])
def test_a_row_is_judged_by_the_stream_of_its_own_round(ours: float, mark: str) -> None:
    """With P = 2 the vector goes through the link once: as long as the stream takes, which differs from round to round."""
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
        "16 MiB, 2 x 2": {
            "seconds": {"stream": stream, "by axes": [0.2] * 8, "hierarchical": [0.105] * 8}
        },
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


def test_settings_have_names_of_their_own() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
