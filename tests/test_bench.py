"""Test the benchmark harness: ranks take the same number of steps, and no record is lost."""

import json
import os
import pkgutil
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import msgspec
import pytest
import torch
from hypothesis import given as drawn, strategies as st
from studies.commands import output_of
from test_records import GOOD
from test_scaling import program

import sp_core as sp
from benchmarks import launching, record, records
from benchmarks.__main__ import PROGRAMS
from benchmarks.cases import bench_collectives, bench_layers, bench_schemes
from benchmarks.cases.session import meet
from benchmarks.cases.setting import BENCHMARKS, LAYERS, NOTHING, Setting, module_of
from benchmarks.contests.contest import Contest
from benchmarks.machine import fingerprint
from benchmarks.sample import OVERHEAD, Budget, agree, choose, take, timing as timing_of, turn
from benchmarks.worker import THREADS
from sp_core.launch.signals import handled
from sp_core.testing import spmd

PROGRAM: dict[str, Any] = {name: pkgutil.resolve_name(path) for name, path in PROGRAMS.items()}
starts_processes = pytest.mark.mpi_skip
SLEEP = 0.004
SHORT = Budget(seconds=0.03, warmup_s=0.0, fewest=3, most=4)


@drawn(st.floats(1e-7, 10.0), st.floats(0.0, 1.0))
def test_counts_keep_the_barrier_small_or_the_budget(step: float, meeting: float) -> None:
    budget = Budget()
    counts = choose(step, meeting, budget)
    sample = counts.inner * step
    assert (
        meeting <= OVERHEAD * sample * (1 + 1e-9)
        or (counts.inner + 1) * step * budget.fewest > budget.seconds
    )
    assert budget.fewest <= counts.samples <= budget.most
    assert (
        counts.samples == budget.fewest
        or 0.8 * budget.seconds < counts.samples * sample <= budget.seconds * (1 + 1e-9)
    )
    assert 1 <= counts.warmup <= budget.fewest


@spmd()
def test_ranks_with_unequal_work_take_the_same_steps_and_the_slowest_one_counts(comm: Any) -> None:
    """The last rank works on after the last message; the time of the step includes that work."""
    steps = list[float]()
    with sp.Mesh(comm, sp=comm.size) as mesh:

        def step() -> None:
            mesh["sp"].agree_on(lambda: "step", lambda: 0)
            steps.append(1.0)
            time.sleep(SLEEP * (comm.rank == comm.size - 1))

        how: Any = {"sync": lambda: None}
        counts = agree(step, comm, SHORT, **how)
        spans, notes = take(step, comm, counts, note=lambda: {"squares": len(steps) ** 2.0}, **how)
    assert comm.allgather((counts, steps)) == [(counts, steps)] * comm.size
    timing = timing_of(spans, counts.inner)
    assert min(*timing["samples_s"], timing["per_rank_median_s"][-1]) >= SLEEP
    assert len(timing["samples_s"]) == counts.samples
    begins = range(len(steps) - counts.samples * counts.inner, len(steps), counts.inner)
    assert notes == [[{"squares": 2.0 * n + counts.inner} for n in begins]] * comm.size


def test_a_turn_that_fails_leaves_later_ones_their_threads() -> None:
    usual, seen = torch.get_num_threads(), list[int]()

    def act() -> None:
        seen.append(torch.get_num_threads())
        raise ValueError("out of memory")

    try:
        with pytest.raises(ValueError, match="out of memory"):
            turn(Mock(), act, threads=THREADS + 1)
        assert (seen, torch.get_num_threads()) == ([THREADS + 1], THREADS)
    finally:
        torch.set_num_threads(usual)


@spmd()
def test_all_ranks_learn_which_of_them_failed(comm: Any) -> None:
    error = ValueError("too small") if comm.rank == comm.size - 1 else None
    assert meet(comm, error) == [f"rank {comm.size - 1}: ValueError: too small"]


def test_every_collective_algorithm_and_scheme_of_the_library_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(vars(bench_schemes)["SCHEMES"], "novel", lambda *_, **__: None)
    monkeypatch.setitem(vars(bench_collectives)["ALGORITHMS"], "shift", ("auto", "mpi", "novel"))
    found = {(case.scheme, case.algorithm) for case in bench_collectives.cases(2)}
    offered = vars(bench_collectives)["ALGORITHMS"].items()
    assert found == {(name, how) for name, ways in offered for how in ways if how != "auto"}
    for suite in (bench_schemes, bench_layers):
        assert any(case.scheme == "novel" for case in suite.cases(2))


def test_ids_are_unique_and_fit_the_schema() -> None:
    files = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("cases/bench_*.py")}
    assert files == {*LAYERS}, "name each file of cases in LAYERS of benchmarks/cases/setting.py"
    for ranks in (1, 2, 3, 4, 6):
        cases = [case for layer in LAYERS for case in module_of(layer).cases(ranks)]
        assert len({case.id for case in cases}) == len(cases)
        for case in cases:
            made = Setting().record(case, status="missing", reason="none")
            records.parse(msgspec.json.encode(made))


UNREACHED = "the launch ended before this case"


def planned(*names: str, ranks: int) -> list[records.Case]:
    changed = {"ranks": ranks, "mesh": {"sp": ranks}}
    return [msgspec.convert(GOOD["case"] | changed | {"id": name}, records.Case) for name in names]


DIED = "killed, most likely because memory ran out, while measuring b"
DEATH = [("a", "ok", None), ("b", "oom", DIED), ("c", "missing", f"{UNREACHED}: {DIED}")]
STOPPED = [(name, "missing", f"{UNREACHED}: interrupted") for name in "abc"]


@pytest.mark.parametrize(
    ("end", "told"),
    [((137, "a rank died of signal 9"), DEATH * 2), (None, [DEATH[0], *STOPPED[1:], *STOPPED])],
)
def test_an_end_in_the_middle_loses_nothing(
    end: Any, told: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If a launch dies in its second case, the launch of more ranks follows all the same.

    After an interruption it does not. The job's folder lies below the checkout, which all nodes
    share, and is removed. Records of another run or launch count for nothing.
    """
    out, folders = tmp_path / "records.jsonl", list[Path]()
    (tmp_path / "sp_core").mkdir()

    def watch(command: list[str], folder: Path, timeout: float, progress: Any) -> Any:
        job = json.loads((folder / "job.json").read_text())
        assert job["root"] == str(tmp_path)  # the checkout whose library is measured
        folders.append(folder.relative_to(launching.REPORTS))
        parts = {name: GOOD[name] for name in (*NOTHING, "status", "reason")}
        parts["timing"] = GOOD["timing"] | {"per_rank_median_s": [0.5] * job["ranks"]}
        setting = msgspec.convert(job["setting"], Setting)
        records.append(out, setting.record(planned("a", ranks=job["ranks"])[0], **parts))
        other = planned("c", ranks=job["ranks"])[0]
        for theirs in (Setting(), msgspec.structs.replace(setting, launch=1)):
            records.append(out, theirs.record(other, status="missing", reason="none"))
        news = {"case": "b", "phase": "measuring b", "done": 1, "total": 2}
        (folder / "progress").write_text(json.dumps(news))
        progress(**news)
        if end is None:
            raise KeyboardInterrupt
        return end

    monkeypatch.setattr(launching, "watch", watch)
    plan = {ranks: planned("a", "b", "c", ranks=ranks) for ranks in (1, 2)}
    monkeypatch.setattr(record, "listing", lambda *_: plan)
    assert record.main(["--out", str(out), "--root", str(tmp_path)]) == 1
    found = [one for one in records.read(out).records if one.reason != "none"]
    assert [(one.case.id, one.status, one.reason) for one in found] == told
    assert not any((launching.REPORTS / folder).exists() for folder in folders)


def test_each_text_that_no_case_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "listing", lambda *_: {1: planned("a", ranks=1)})
    assert record.main(["--only", "a", "--only", "x", "--list"]) == 2
    assert "no case has 'x' in its name" in capsys.readouterr().err


def test_a_file_that_grows_too_large_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its records can no longer be read. A later run refuses the file at once."""
    out = tmp_path / "records.jsonl"
    out.touch()

    def watch(*_: object) -> Any:
        os.truncate(out, records.MAX_BYTES + 1)
        return 1, "it failed"

    monkeypatch.setattr(record, "listing", lambda *_: {1: planned("a", ranks=1)})
    monkeypatch.setattr(launching, "watch", watch)
    for code in (1, 2):
        assert record.main(["--out", str(out)]) == code
        assert "are allowed" in capsys.readouterr().err
        monkeypatch.setattr(launching, "watch", pytest.fail)


def test_a_full_disk_is_told_in_one_line_and_the_records_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, write = tmp_path / "records.jsonl", records.append
    full = OSError(28, "No space left", "the folder")
    monkeypatch.setattr(record, "listing", lambda *_: {1: planned("a", "b", ranks=1)})
    monkeypatch.setattr(launching, "watch", lambda *_: (1, "it failed"))
    monkeypatch.setattr(records, "append", Mock(side_effect=[DEFAULT, full, full], wraps=write))
    assert record.main(["--out", str(out)]) == 1
    shown = capsys.readouterr()
    told = "bench: [Errno 28] No space left: 'the folder'; 1 of 2 records are kept."
    assert (told in shown.err, "it failed" in shown.out) == (True, True)


REFUSED = {
    "scaling": {
        "--ranks 0": "every number must be 1 or more",
        "--ranks 2,2": "appear once",
        "--ranks two": "not a list of numbers",
        "--heads 7": "7 heads of 73 make 511",
        "--kv-heads 3": "3 key/value heads. --hidden must be",
        "--head-dim 32 --hidden 512": "hidden is 512, 8 heads of 32 make 256",
        "--seq 0": "seq is 0",
        "--scheme hybrid --ranks 2": "2 ranks make no hybrid mesh",
        "--dtype float8": "dtype is 'float8'",
        "--transport pigeon": "transport 'pigeon' on cpu",
        "--timeout 0": "pass more than 0",
        "--launcher srun": "write {ranks} in it",
        "--launcher no-such-program{ranks}": "no no-such-program",
        "--launcher 'env {ranks} {foo}'": "double other braces",
        "--launcher 'env {ranks} {ranks.foo}'": "double other braces",
        '--launcher "env {ranks} \'"': "No closing quotation",
        "--timeout nan": "pass more than 0",
        "--iterations 10001": "iterations is 10001; pass at most 10000",
        "--device cuda --share-gpu": "torch sees 0 GPUs",
        "--out file": "cannot be written",
    },
    "bench": {
        "--ranks two": "not a list of numbers",
        "--timeout 0": "pass more than 0",
        "--launcher srun": "write {ranks} in it",
        "--root /": "has no folder sp_core",
        "--out /dev/full": "no ordinary file",
        "--out /dev/null": "no ordinary file",
        "--out file": "file, line 1: no JSON",
    },
    "compare": {"HEAD --device xpu": "--device: invalid choice: 'xpu'"},
    "documents": {"--rounds 0": "0 is not 1 or more", "--ranks 3": "and divide 8"},
    "growth": {"--rounds 0": "0 is not 1 or more", "--ranks 18": "16 or more, and divide 64"},
    "collectives": {
        "--launches 0": "0 is not 1 or more",
        "--launches two": "invalid int value",
    },
    "netlab": {"--rounds -3": "-3 is not 1 or more"},
    "gpu": {"--mib nan": "nan is not", "--mib inf": "inf is not"},
    "bench_selftest": {
        "--same -1": "-1 is not 0 or more",
        "--same 0 --slower 0": "nothing would be measured",
        "--cases ulysses": "has the planted work",
    },
    "train": {
        "--ranks 1": "every number must be 2 or more",
        "--only pp": "no launch has 'pp'",
        "--steps 0": "argument --steps: 0 is not 1 or more",
    },
    "balance": {
        "--ranks 0": "1 or more",
        "--rounds -1": "-1 is not 0 or more",
        "--timeout nan": "pass more than 0",
    },
    "peers": {
        "--seq 30": "multiples of 4",
        "--seq 32 --ranks 4,6 --heads 12": "multiples of 24",
        "--seq 64,64": "appear once",
        "--seq many": "not a list of numbers",
        "--launches 0": "0 is not 1 or more",
        "--samples -1": "-1 is not 0 or more",
        "--heads 0": "0 is not 1 or more",
        "--heads 3": "and divide 3",
        "--dtype float32,foo": "'foo' is none of float32",
        "--timeout nan": "pass more than 0",
        "--device cuda --ranks 2,4": "P = 2 needs a GPU for each rank; there are 0. P = 4",
        "--only nothing": "--list prints all",
        "--timeout 0": "pass more than 0",
        "--out /": "cannot be written",
        "--out /proc/nope": "cannot be written",  # not even root can write there
    },
    "trace": {"--hidden 10 --heads 3": "3 heads of 3 make 9"},
}


@starts_processes
@pytest.mark.parametrize(
    ("program", "options", "complaint"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows.items()],
)
def test_bad_options_are_refused_before_anything_starts(
    program: str,
    options: str,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(record, "listing", lambda *_: pytest.fail("cases were listed"))
    monkeypatch.setattr(launching, "run", lambda *_, **__: pytest.fail("a launch began"))
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("a note\n")
    with pytest.raises(SystemExit, match=r"^2$"):  # argparse raises it, and the others return 2
        sys.exit(PROGRAM[program](["--out", "folder/out", *shlex.split(options)]))
    assert complaint in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["file"]
    assert Path("file").read_text() == "a note\n"


def test_every_program_names_a_function_that_its_ranks_can_call() -> None:
    """Every benchmark session of nox is one of these programs."""
    sessions = re.findall(r'"benchmarks (\w+)[ "]', (launching.ROOT / "noxfile.py").read_text())
    assert {*sessions} == {*PROGRAMS} - {"gpu"}
    texts = "".join(path.read_text() for path in (launching.ROOT / "benchmarks").rglob("*.py"))
    named = re.findall(r'"(benchmarks[\w.]+:\w+)"', texts)
    named += [one.measure for one in PROGRAM.values() if isinstance(one, Contest)]
    assert len({*named} - {*PROGRAMS.values()}) == 14
    assert all(callable(pkgutil.resolve_name(name)) for name in named)


@pytest.mark.parametrize(("first", "code"), [("", 0), ("import sp_core\n", 1)])
def test_the_library_comes_from_the_checkout_that_was_named_or_not_at_all(
    first: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "sp_core").mkdir()
    (tmp_path / "sp_core" / "__init__.py").write_text("")
    program = (
        f"{first}import sys\nfrom pathlib import Path\nfrom benchmarks.worker import take_library\n"
        f"take_library(Path({str(tmp_path)!r}))\nimport sp_core\n"
        f"assert sp_core.__file__ == {str(tmp_path / 'sp_core/__init__.py')!r}\n"
        f"assert {str(tmp_path)!r} not in sys.path\n"
    )
    told = output_of([sys.executable, "-c", program], launching.ROOT, os.environ, 60, {code})
    assert code == 0 or "was imported" in told


@starts_processes
def test_a_run_from_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real launch writes records and rank 0's pytest-benchmark file, and prints the table.

    It reads no constants of earlier measurements.
    """
    monkeypatch.setenv("SP_TUNING", "/proc/nope")
    out = tmp_path / "bench.jsonl"
    only = ("--only", "schemes/ring", "--only", "collectives/all_gather")
    shown = program("bench", "--ranks", "2", "--quick", *only, "--out", str(out))
    found = records.read(out)
    assert (found.problems, len(found.records)) == ([], 3)
    for one in found.records:
        plain = msgspec.to_builtins(one)
        sent = {name: entry["bytes_sent"] for name, entry in plain["comm"].items()}
        assert sum(sent.values()) - sent.get("control", 0) == plain["work"]["bytes_formula"] > 0
        made = fingerprint(*(plain[name] for name in ("env", "device", "transport")))
        assert (one.env and one.env.fingerprint, one.case.id in shown) == (made, True)
    saved = tmp_path / f"bench-{found.records[0].run_id}-p2.pytest-benchmark.json"
    assert {*tmp_path.iterdir()} == {out, saved}
    theirs = json.loads(saved.read_text())["benchmarks"]
    medians = {one.case.id: one.seconds for one in found.records}
    assert {entry["param"]: pytest.approx(entry["stats"]["median"]) for entry in theirs} == medians


@starts_processes
def test_a_launch_that_takes_too_long_is_ended_by_the_launcher() -> None:
    """The launch has less time than a rank needs for its imports."""
    found = launching.run(1, "nowhere:measure", {}, launching.Launch(timeout=0.5))
    assert found["status"] == "timeout"
    assert found["took_s"] < launching.GRACE_SECONDS  # else the launcher itself would be killed


@pytest.mark.parametrize("ending", ["TERM", "HUP", "QUIT", "USR1", "USR2", "XCPU"])
@pytest.mark.parametrize(
    ("usual", "raised"), [(signal.SIG_DFL, KeyboardInterrupt), (signal.SIG_IGN, SystemExit)]
)
def test_a_signal_that_ends_a_program_ends_its_ranks_unless_it_is_ignored(
    ending: str, usual: Any, raised: Any
) -> None:
    """A closed terminal sends SIGHUP, which `nohup` ignores; ranks must not go on without us."""
    number = signal.Signals[f"SIG{ending}"]

    def interrupted(_: object) -> int:
        os.kill(os.getpid(), number)
        return 0

    with handled([number], usual), pytest.raises(raised):
        launching.main(interrupted)
