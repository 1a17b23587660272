"""Test the emulated hosts, how MPIs are started on them, and the verdicts on the rows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import sp_core as sp
from benchmarks import launching
from benchmarks.contests.netlab import hosts, table as program
from benchmarks.contests.netlab.table import check_all, netlab, rows
from sp_core.programs import ALGORITHMS
from sp_core.testing import spmd


@pytest.mark.mpi_skip
@pytest.mark.parametrize("library", [True, False])
@spmd(2)
def test_what_hosts_check_is_what_they_have(comm: Any, library: bool) -> None:
    """Hosts share no memory. The model of a link carries no collective of the MPI library."""
    absent = ("window",) if library else ("window", "auto", "mpi")
    there = sum(name not in absent for names in ALGORITHMS.values() for name in names)
    with sp.Mesh(comm, hosts=2, ranks=1) as mesh:
        assert check_all(mesh["hosts", "ranks"], library=library) == there


@pytest.mark.parametrize("delay", [0.0, 1e-3])
def test_every_link_is_shaped_on_both_ends_or_carried_by_the_switch(delay: float) -> None:
    """No command touches anything outside the hosts and the switch."""
    lines = hosts.commands(hosts.names(3), 1e9, delay)
    acts = [re.match("(?:ip|tc) (?:-n|netns add) ([a-z0-9]+)", line) for line in lines]
    assert {act and act[1] for act in acts} == {*hosts.names(3), "switch"}
    assert sum(line.startswith("ip netns add") for line in lines) == 3
    assert sum("1000000000bit" in line for line in lines) == (0 if delay else 6)


@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "tc"))),
    reason="needs root, and unshare, ip and tc on the PATH",
)
@pytest.mark.parametrize("delay", ["0.0", "0.001"])
def test_a_command_runs_on_the_first_host_and_nothing_stays(delay: str) -> None:
    """The command reaches host h1 by name and finds no h2. Its exit code is returned."""
    if subprocess.run(
        [*hosts.ALONE, "mount", "-t", "tmpfs", "none", "/run"], check=False
    ).returncode:
        pytest.skip("no namespaces here")
    connect = "socket.create_connection((name, 9), 5)"
    program = f"import socket, sys\nfor name in sys.argv[1:]:\n  try: {connect}\n"
    program += "  except OSError as error: print(socket.gethostname(), type(error).__name__)\n"
    program += "sys.exit(7)"
    module = (sys.executable, "-m", "benchmarks.contests.netlab.hosts", "2", "1e9", delay)
    command = [*hosts.ALONE, *module, sys.executable, "-c", program, "h1", "h2"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.stdout.splitlines() == ["h0 ConnectionRefusedError", "h0 gaierror"]
    assert answer.returncode == 7
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert "h1" not in listed.stdout


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ("", "ip, tc not found on the PATH. Install iproute2 with apt-get, "),
        ("ip tc", "/dev/net/tun, which links with a delay need, is not there. Load tun, "),
    ],
)
def test_root_without_the_programs_is_red(
    there: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    substitute: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The program fails; it does not fall back to the model of a link."""
    monkeypatch.setattr(launching, "run", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr("benchmarks.contests.netlab.table.os.geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    none = Mock(exists=Mock(return_value=False))
    substitute(program, installed=lambda: "mpich", Path=lambda _: none)
    assert netlab([]) == 2
    assert f"{told}or pass --link-model." in capsys.readouterr().err


def test_without_root_the_output_says_that_the_link_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch that the MPI launcher makes fail is repeated once before it counts as failed."""
    failed = {"status": "failed", "reason": "exit code 3", "output": "demux engine error"}
    right = {"status": "ok", "seconds": {"stream": [0.1], "segmented_ring": [0.1]}}
    run, out = Mock(side_effect=[failed, failed, failed, right]), tmp_path / "out.json"
    monkeypatch.setattr("benchmarks.contests.netlab.table.os.geteuid", lambda: 1000)
    monkeypatch.setattr(launching, "run", run)
    monkeypatch.setattr(program, "installed", lambda: "mpich")
    assert netlab(["--only", "16 MiB, P", "--out", str(out)]) == 1  # P = 2 failed twice
    for text in (capsys.readouterr().out, out.read_text()):
        assert "link model inside the transport" in text
    settings = [call.args[2] for call in run.call_args_list]
    names = ["16 MiB, P = 2"] * 2 + ["16 MiB, P = 3"] * 2
    assert [(one.name, one.modelled) for one in settings] == [(name, True) for name in names]


def test_mpis_are_started_by_the_agent_on_every_host() -> None:
    for mpi in ("mpich", "openmpi"):
        assert {str(hosts.AGENT), "h0:2,h1:2"} <= set(program.across(mpi, 2, 2))


@pytest.mark.parametrize(("ours", "mark"), [(0.104, "reached"), (0.106, "not reached")])
def test_a_row_is_judged_by_the_stream_of_its_own_round(ours: float, mark: str) -> None:
    """With P = 2 the vector crosses the link once. It may take as long as that round's stream."""
    stream, rounds = [0.1] * 8, range(1, 9)
    launches = {
        "16 MiB, P = 2": {
            "seconds": {
                "stream": [0.1 * k for k in rounds],
                "segmented_ring": [ours * k for k in rounds],
            }
        },
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
        "all_reduce 16 MiB, P = 2: time / (2(P-1)/P n/B)": (mark, round(ours * 10, 3)),
        "all_reduce 16 MiB, P = 3: time / (2(P-1)/P n/B)": ("not reached", 1.125),
        "all_reduce 16 MiB, P = 3: library / segmented_ring": ("not reached", 2.0),
        "all_reduce 1 KiB, 1 ms, P = 4: library / recursive_doubling": ("not measured", None),
        "all_reduce 64 KiB, 1 ms, P = 4: library / recursive_doubling": ("reached", 3.0),
        "all_reduce 16 MiB, 2 x 2: (n/B) / hierarchical": ("reached", 0.952),
        "ring attention: share of the communication that is hidden": ("not reached", 0.8),
    }
