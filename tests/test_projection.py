"""Test `sp-core plan` and the command line. Projections send what `cost` says."""

import errno
import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import astuple, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from domains.public import commands

import sp_core as sp
from sp_core import cost, projection
from sp_core.__main__ import main, make_parser
from sp_core.link import Link, link_of
from sp_core.machine import node_name
from sp_core.mesh import fingerprint
from sp_core.projection import Problem, project
from sp_core.schemes.hybrid import groups_of
from sp_core.tuning import Curve, Tuning, default_path, save

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = [name.removeprefix("sp-core ") for name in commands()]
FAST = Link(0.0, 0.0)
TINY = f"0.{'0' * 318}1mb,1us"  # a byte would take more seconds than a float can tell
SMALL = Problem(240, 2, 12, 4, 8, 2, 4, 2, FAST, FAST, 1e9)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("kv_heads", [12, 4, 2])
@pytest.mark.parametrize("itemsize", [2, 8])
def test_every_projection_sends_what_its_formula_says(
    ranks: int, kv_heads: int, itemsize: int
) -> None:
    """Compare the rank that sends most, for a causal mask, a zigzag sharding and all gradients."""
    problem = replace(SMALL, ranks=ranks, num_kv_heads=kv_heads, itemsize=itemsize)
    sharding = sp.Sharding.zigzag(problem.seq_len, ranks)
    sizes = cost.Attention(sharding, sharding, sp.Mask(causal=True), 2, 12, kv_heads, 8, itemsize)
    for found in project(problem):
        groups = groups_of(found.ring, found.ulysses, ulysses_fastest=True)
        places = product(range(found.ring), range(found.ulysses))
        sent = [cost.hybrid(sizes, *place, groups) for place in places]
        if found.scheme == "allgather_kv":
            sent = [cost.allgather_kv(sizes, 0)]
        busiest = [max(both, key=lambda one: one.bytes_sent) for both in zip(*sent, strict=True)]
        assert [found.forward, found.backward] == busiest, found


# An exchange of Ulysses takes as long as on its slowest rank: two messages to each peer on the
# node, then two to each elsewhere, while the node's link carries what all its ranks send away.
NODE, NETWORK = Link(1.0, 1 / 8), Link(20.0, 1 / 2)
BY_HAND = [
    (
        Problem(24, 2, 4, 4, 3, 2, 6, 3, NODE, NETWORK, 128.0),
        "hybrid 2 3 3788.5 3599.5; allgather_kv 6 1 4266 4140; hybrid 3 2 4486 4360; "
        "ring 6 1 4565 4439",
    ),
    (
        Problem(24, 2, 4, 2, 3, 8, 4, 4, NODE, Link(1e4, 1 / 2), 512.0),
        "ulysses 1 4 923.25 876; hybrid 2 2 1039.625 992.375; allgather_kv 4 1 1352.25 1305; "
        "ring 4 1 1461.8125 1414.5625",
    ),
    (
        Problem(24, 3, 4, 4, 5, 2, 4, 1, NODE, NETWORK, 16.0),
        "ulysses 1 4 6180 2400; hybrid 2 2 7810 4030; ring 4 1 11225 7445; "
        "allgather_kv 4 1 12600 8820",
    ),
    (
        Problem(24, 1, 4, 2, 1, 2, 6, 2, Link(200.0, 1 / 8), Link(1.0, 1 / 16), 2.0),
        "hybrid 3 2 2165 821; hybrid 2 3 2852.5 836.5; ring 6 1 3512 2168; "
        "allgather_kv 6 1 4424 3080",
    ),
    (
        Problem(24, 1, 4, 2, 1, 2, 6, 2, Link(1.0, 1 / 16), Link(200.0, 1 / 8), 2.0),
        "hybrid 3 2 1938 594; ring 6 1 3512 2168; hybrid 2 3 3878 1862; allgather_kv 6 1 4424 3080",
    ),
    (
        Problem(12, 1, 6, 2, 1, 2, 6, 6, Link(0.0, 1 / 8), NETWORK, 48.0),
        "hybrid 3 2 35 14; ulysses 1 6 41 20; ring 6 1 47.5 26.5; allgather_kv 6 1 61 40; "
        "hybrid 2 3 61.5 40.5",
    ),
    (
        Problem(4, 1, 1, 1, 1, 1, 2, 1, NODE, NETWORK, 2.0),
        "allgather_kv 2 1 100 72; ring 2 1 114 86",
    ),
    (  # the second node has one rank; by the ring, rank 2 sends to rank 0 on its own node
        Problem(8, 1, 2, 2, 1, 1, 4, 3, Link(0.0, 0.0), Link(0.0, 1.0), 16.0),
        "hybrid 2 2 103 89; allgather_kv 4 1 158 144; ring 4 1 179.5 165.5",
    ),
    (  # two of three heads on one rank
        Problem(24, 1, 3, 3, 2, 2, 4, 4, Link(0.0, 0.0), Link(0.0, 0.0), 8.0),
        "ring 4 1 756 0; allgather_kv 4 1 756 0; hybrid 2 2 1008 0",
    ),
    (Problem(2, 1, 1, 1, 1, 1, 1, 1, NODE, NETWORK, 2.0), "ring 1 1 14 0; allgather_kv 1 1 14 0"),
]


@pytest.mark.parametrize(("problem", "by_hand"), BY_HAND)
def test_times_are_those_of_the_formulas(problem: Problem, by_hand: str) -> None:
    """Rows: scheme, ranks of ring and ulysses, seconds, exposed seconds, all exact in binary."""
    rows = [
        f"{one.scheme} {one.ring} {one.ulysses} {one.seconds:.12g} {one.exposed:.12g}"
        for one in project(problem)
    ]
    assert rows == by_hand.split("; ")


def test_links() -> None:
    assert astuple(link_of("25gbit,10us")) == pytest.approx((1e-5, 8 / 25e9))
    assert astuple(link_of("400MB/s,1ms")) == pytest.approx((1e-3, 1 / 400e6))
    assert astuple(link_of("8mbit,2s")) == pytest.approx((2.0, 1e-6))
    for text in ("25Gb,10us", "25gb/s,10us", "25Gbit,10us", "25GBIT,10US", "3.125GB,10us"):
        assert astuple(link_of(text)) == pytest.approx((1e-5, 8 / 25e9)), text
    for wrong in ("fast", "25gbit", "0gbit,1us", "25parsec,1us", "1.2.3gb,1us", TINY):
        with pytest.raises(ValueError, match="RATE,LATENCY"):
            link_of(wrong)


def test_the_speed_of_attention_is_its_operations_over_the_shortest_of_four_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 4.0, 4.0, 7.0, 7.0, 9.0, 9.0, 9.5])
    monkeypatch.setattr("sp_core.projection.time.perf_counter", lambda: next(clock))
    attention = Mock()
    monkeypatch.setattr(projection, "local_attention", attention)
    assert projection.timed_flops(head_dim=2) == 2 * 1024**2 * 4 * 2 / 0.5
    given = [
        ({(x.shape, x.dtype) for x in each.args}, each.kwargs) for each in attention.mock_calls
    ]
    assert given == [({((1, 1024, 4, 2), torch.float32)}, {"mask": sp.Mask(causal=True)})] * 4


SIZES = ("seq", "ranks-per-node", "heads", "kv-heads", "head-dim", "batch")
ARGUMENTS = [
    "plan",
    "--seq",
    "65536",
    "--ranks",
    "64",
    "--heads",
    "32",
    "--flops",
    "1e14",
    "--link",
    "25gbit,10us",
]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--ranks-per-node", "2"], "pass --node-link"),
        (["--seq", "65537"], "equal shards"),
        (["--seq", str(64 * 1025)], "equal shards"),  # zigzag needs two blocks a rank
        (["--kv-heads", "5"], "equal shards"),
        *(([f"--{name}", "-1"], "at least 1") for name in SIZES),
        (["--ranks", "0"], "at least 1"),
        (["--heads", "0"], "at least 1"),
        (["--kv-heads", "0"], "at least 1"),
        (["--seq", str(128 * 2**34)], "at most 2**40"),
        (["--link", "quick"], "RATE,LATENCY"),
        (["--show", "0"], "--show is 0: pass at least 1"),
        (["--flops", "0"], "--flops is 0.0: pass the operations"),
        (["--flops", "nan"], "--flops is nan: pass the operations"),
        (["--flops", "inf"], "--flops is inf: pass the operations"),
        (["--flops=-1e12"], "pass the operations"),
        (["--link", "nangbit,1us"], "RATE,LATENCY"),
        (["--link", "-1gbit,1us"], "RATE,LATENCY"),
        (["--link", "9" * 400 + "gbit,1us"], "RATE,LATENCY"),
        (["--link", "1gbit," + "9" * 400 + "us"], "RATE,LATENCY"),
    ],
)
def test_what_cannot_be_planned(
    more: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: object,
) -> None:
    monkeypatch.setenv("SP_TUNING_DIR", str(tmp_path))
    for given in [ARGUMENTS, [x for x in ARGUMENTS if x not in ("--flops", "1e14")]]:
        with pytest.raises(SystemExit) as stop:
            main([*given, *more])
        assert stop.value.code == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("given", [True, False])
def test_a_figure_of_this_machine_is_told_unless_it_was_given(
    given: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SP_TUNING_DIR", str(tmp_path))
    monkeypatch.setenv("SP_TUNING", "auto")
    curve = Curve(((1, 1e-6),))
    here = Tuning(fingerprint(), (0, 0), {"node": curve}, curve, curve)
    save(here, default_path(here.fingerprint))
    monkeypatch.setattr(projection, "timed_flops", timed := Mock(return_value=1e9))
    figures = ["--flops", "1e-3", "--node-link", "100gbit,1us"] if given else []
    sizes = ["plan", "--seq", "65536", "--ranks", "64", "--heads", "32", "--ranks-per-node", "2"]
    assert main([*sizes, "--head-dim", "4096", "--link", "25gbit,10us", *figures]) == 0
    assert timed.mock_calls == ([] if given else [call(1024)])  # wider heads would take longer
    told = re.findall(r"Assumed.*\((--[a-z-]+)\)", capsys.readouterr().out)
    assert told == ([] if given else ["--flops", "--node-link"])


def test_a_plan_takes_the_constants_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SP_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(projection, "main", planned := Mock())
    curve, machine = Curve(((1, 1e-6),)), {"host": node_name()}
    paths = default_path(machine), tmp_path / "mine.json"
    for path in paths:
        save(Tuning(machine, (0, paths.index(path)), {"node": curve}, curve, curve), path)
    line = ["plan", *SHORT, "--link", "8gbit,1ms"]
    choices = ("", (0, 0)), ("auto", (0, 0)), ("off", None), (str(paths[1]), (0, 1))
    for choice, nodes in choices:
        monkeypatch.setenv("SP_TUNING", choice)
        assert main(line) == 0
        tuning = planned.call_args.args[1]
        assert (tuning and tuning.nodes) == nodes
    monkeypatch.setenv("SP_TUNING", str(tmp_path / "lost.json"))
    with pytest.raises(SystemExit, match="2"):
        main(line)


SHORT = ["--seq", "49152", "--ranks", "4", "--heads", "4", "--flops", "1e12"]
TOLD = """\
scheme         ring x ulysses          ms  waiting    MB sent   messages
ring                    4 x 1     2216.00       2%      327.2         10
ulysses                 1 x 4     2252.16       4%       75.5          0
hybrid                  2 x 2     2270.33       5%      176.2          4
allgather_kv            4 x 1     2475.65      13%      302.0          0
One layer, forward and backward; 1e+12 operations/s per rank, 4 ranks, """


def told(*more: str, tuning: Tuning | None = None) -> str:
    return projection.main(make_parser().parse_args(["plan", *SHORT, *more]), tuning)


def test_a_plan_tells_times_bytes_and_what_is_not_known() -> None:
    """The table is the same whether the node's link was measured or passed as --node-link."""
    unknown = (
        "1 to a node.\nThe error of these times is not known: measure this machine with sp-core "
        "doctor --measure, and do not set SP_TUNING=off."
    )
    assert told("--link", "8gbit,1ms") == TOLD + unknown
    assert told("--link", "8gbit,1ms", "--seq", str(2**40)).endswith(unknown)  # the longest
    inside, sums = Curve(((8, 1e-3), (1 << 30, 1e-9 * (1 << 30)))), Curve(((8, 1.0),))
    node = Tuning({"host": "a"}, (0,) * 4, {"node": inside}, sums, sums, error=(0.25, 0.5))
    measured = told("--ranks-per-node", "4", "--link", "1mbit,1s", tuning=node)
    assert measured.startswith(f"{TOLD}4 to a node.\n")
    assert measured.endswith(
        "The model was off by 25% (median) and 50% (95th percentile) for collectives of 4 ranks on "
        "a. Beyond those it is an extrapolation: congestion, stragglers and other jobs "
        "are not in it."
    )
    given = told("--ranks-per-node", "4", "--link", "1mbit,1s", "--node-link", "1GB,1000000ns")
    assert given.startswith(f"{TOLD}4 to a node.\n")
    away = replace(node, links={"network": inside})
    with pytest.raises(ValueError, match="pass --node-link"):
        told("--ranks-per-node", "2", "--link", "1mbit,1s", tuning=away)


@pytest.mark.mpi_skip
def test_every_example_tells_schemes_apart_also_where_nothing_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SP_TUNING_DIR", str(tmp_path))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), Path(projection.__file__)]
    texts = [page.read_text() for page in pages]
    lines = [line for text in texts for line in re.findall(r"sp-core (plan --[^`\n]*)", text)]
    assert len(lines) > 2
    for line in lines:
        assert main(line.split()) == 0
        rows = [row.split() for row in capsys.readouterr().out.splitlines() if " x " in row]
        times = [float(row[4]) for row in rows[1:]]
        assert max(times) > 2 * min(times), line


@pytest.mark.mpi_skip
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80, "shorten the words of the options in the help"
    assert command or f"{{{','.join(COMMANDS)}}}" in shown
    assert command != "plan" or str(projection.__doc__).strip() in shown


@pytest.mark.parametrize("command", ["generate", "logits"])
def test_a_number_that_help_calls_the_default_is_the_default(command: str) -> None:
    commands = vars(make_parser())["_subparsers"]._group_actions[0].choices
    named = [
        (number, str(option.default))
        for option in commands[command]._actions
        for number in re.findall(r"\(default: ([\d.]+)\)", option.help or "")
    ]
    assert named
    assert all(number == default for number, default in named), named


WORDS = {"run": ["-n", "2"], "doctor": [], "plan": ARGUMENTS[1:], "logits": ["--model", "dir"]}
TARGETS = {
    "run": "launch.command.main",
    "doctor": "doctor.main",
    "plan": "__main__._plan",
    "logits": "inference.main",
}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("command", [*WORDS])
def test_a_command_gets_its_words_and_gives_its_exit_code(
    command: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`main` uses the words that it is given, or else those in `sys.argv`."""
    words = [command, *WORDS[command]]
    called = {name: Mock(return_value=7) for name in TARGETS}
    for name, carry_out in called.items():
        monkeypatch.setattr(f"sp_core.{TARGETS[name]}", carry_out)
    monkeypatch.setattr(sys, "argv", ["sp-core", *(["none"] if given else words)])
    comm: Any = "comm"
    assert main(words if given else None, comm) == 7
    (call,) = called.pop(command).call_args_list
    assert not any(other.called for other in called.values())
    wanted: dict[str, tuple[object, ...]] = {
        "run": (WORDS["run"],),
        "doctor": (None,),
        "plan": (ArgumentParser, Namespace),
        "logits": (Namespace, words, comm),
    }
    for one, what in zip(call.args, wanted[command], strict=True):
        assert isinstance(one, what) if isinstance(what, type) else one == what


def test_a_full_disk_under_a_named_file_is_no_error_of_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = OSError(errno.ENOSPC, "full", "a file")
    monkeypatch.setattr("sp_core.doctor.main", Mock(side_effect=full))
    with pytest.raises(OSError, match="a file"):
        main(["doctor"])


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"sp_core {sp.__version__}\n"


@pytest.mark.mpi_skip
def test_a_reader_may_stop_early() -> None:
    """The output that Python still holds then goes to the null device."""
    command = subprocess.Popen(
        [sys.executable, "-m", "sp_core", *ARGUMENTS],
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert command.stdout is not None
    command.stdout.close()
    _, said = command.communicate(timeout=60)
    assert (said, command.returncode) == (b"", 1)
