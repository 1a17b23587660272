"""Test `conformance`: its launches, the scripts that repeat a failure, and the report."""

import ast
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conformance import __main__ as program, launching, layers, report
from conformance.attention import Posed, told
from conformance.libraries import LIBRARIES, OURS, named
from conformance.planted import FAULTS
from conformance.script import script
from kit.failing import assert_told

from sp_core import Mask

HERE = Path(__file__).parent / "conformance"
EXAMPLE = Posed(
    *(1, 4, 4, 2, 1, 8, "float32", "contiguous", "contiguous", Mask(causal=True), None, 1.0),
    *("normal", "normal", (True, True, True), "plain", 1),
    shards=((0, 1), (2, 3)),
)


LAYERS = layers.Layers(2, 4, 3, 5, True, "", 1, "float32", True, 7, ((0, 1), (2, 3)))


def cell(capability: str, ranks: int) -> dict[str, Any]:
    return {"library": "torch ring", "capability": capability, "ranks": ranks, "gradients": True}


def line(capability: str, ranks: int, verdict: str = "pass") -> dict[str, Any]:
    return {
        **cell(capability, ranks),
        "verdict": verdict,
        "examples": 5,
        "refused": 0,
        "error": 0.1,
    }


def condemned(problem: dict[str, Any], result: str = "out", rank: int = 0) -> dict[str, Any]:
    """Return the verdict "wrong" of a cell with a problem for one rank."""
    found = {"result": result, "rank": rank, "relative": 1e-3, "problem": problem}
    return {**line("causal", 1, "wrong"), **found}


def test_a_launch_that_dies_takes_one_cell_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On 2 ranks "causal" kills the launch. Neither it nor a wrong or slow cell is tried on 3."""
    tried: list[tuple[int, str]] = []

    def launch(size: int, folder: Path, patience: float) -> str:
        cells = json.loads((folder / "setting.json").read_text())["cells"]
        with (folder / "verdicts.jsonl").open("w") as file:
            for _, capability in cells:
                tried.append((size, capability))
                (folder / "in_flight.json").write_text(json.dumps(cell(capability, size)))
                if capability == "causal":
                    file.write('{"library": "torch r')  # a line that was cut short
                    return "rank 1 died first: killed by SIGSEGV; last place: in the body of body"
                verdict = {"GQA": "wrong", "full": "slow"}.get(capability, "pass")
                file.write(json.dumps(line(capability, size, verdict)) + "\n")
        return ""

    monkeypatch.setattr(launching, "_launch", launch)
    found: launching.Found = {}
    launching.put_on_trial([named("torch ring")], (2, 3), launching.Limits(5, 1.0, tmp_path), found)
    verdicts = {capability: verdict["verdict"] for (_, capability), verdict in found.items()}
    assert verdicts.pop("causal") == "crashed"
    assert [verdicts.pop(name) for name in ("GQA", "full")] == ["wrong", "slow"]
    assert set(verdicts.values()) == {"pass"}
    assert set(verdicts) | {"causal", "GQA", "full"} == set(named("torch ring").tried())
    assert found["torch ring", "causal"]["states"].startswith(
        "rank 1 died first: killed by SIGSEGV"
    )
    assert tried.count((2, "causal")) == 1
    assert {(3, "causal"), (3, "GQA"), (3, "full")}.isdisjoint(tried)
    assert found["torch ring", "MQA"]["ranks"] == [2, 3]
    assert found["torch ring", "MQA"]["examples"] == 10


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (
            ["rank 0 waits for nobody: it is at a.py", "rank 1 waits for nobody: it is at b.py"],
            "slow",
        ),
        (["rank 0 waits for nobody: it is at a.py", "rank 1 waits for rank 0"], "hung"),
        (["rank 0 waits for nobody: it is at a.py"] * 2, "hung"),
    ],
)
def test_ranks_that_all_compute_when_their_time_is_up_do_not_hang(
    said: list[str], verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes: list[int] = []

    def launch(size: int, folder: Path, patience: float) -> str:
        sizes.append(size)
        return "\n".join(
            ["==== the launch was ended: a rank has reached its time limit ====", *said]
        )

    monkeypatch.setattr(launching, "_launch", launch)
    found: launching.Found = {}
    launching.put_on_trial([named("torch ring")], (2, 3), launching.Limits(5, 1.0, tmp_path), found)
    assert {one["verdict"] for one in found.values()} == {verdict}
    assert sizes == [2]
    assert all("a.py" in one["states"] for one in found.values() if verdict == "slow")


def test_patience_multiplies_every_limit_of_a_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = Mock(return_value=(0, "said"))
    monkeypatch.setattr(launching, "printed", printed)
    assert launching._launch(2, tmp_path, 3.0) == "said"
    command, _, variables, seconds = printed.call_args.args
    assert float(variables["SP_WATCHDOG_S"]) == 3 * launching.EXAMPLE_SECONDS
    assert float(command[command.index("--timeout") + 1]) == 3 * launching.LAUNCH_SECONDS
    assert seconds == 3 * launching.LAUNCH_SECONDS + launching.ENDING_SECONDS
    assert command[command.index("--sp-expect-ranks") + 1] == "2"


def test_a_new_run_keeps_the_columns_that_it_has_not_tried() -> None:
    """Each column of the joined report records its own run."""
    order = ["sp_core", "torch ring", "sp_core layers"]
    seen = {
        **line("causal", 2, "wrong"),
        "what": "the mask is lost",
        "result": "out",
        "relative": 0.5,
    }

    def found(name: str, date: str) -> dict[str, Any]:
        commit = {"sha": "0123456789abcdef", "dirty": date == "day 2"}
        machine = {"cores": 2, "python": "3", "torch": "2", "mpi": "none"}
        run = {"date": date, "commit": commit, "seconds": 1, "patience": 1.0, **machine}
        columns = {
            one: {**line("causal", 2), "ranks": [2]} for one in named(name).subject.CAPABILITIES
        }
        planted = [{**seen, "library": name, "date": date}]
        return report.document([named(name)], {name: "1"}, {name: columns}, planted, run, 5)

    both = report.joined(found("sp_core", "day 1"), found("torch ring", "day 1"), order)
    data = report.joined(both, found("torch ring", "day 2"), order)
    dates = [("sp_core", "day 1"), ("torch ring", "day 2")]
    assert [(column["name"], column["run"]["date"]) for column in data["libraries"]] == dates
    assert [(one["library"], one["date"]) for one in data["planted"]] == dates
    text = "\n".join(report.markdown(data))
    assert_told(
        text,
        "| 1 | day 1 | 0123456789 | 1 | 1 | 2 cores",
        "| 2 | day 2 | 0123456789 with changes | 1 | 1 | 2 cores",
        "| run | 1 | 2 |\n| numbers of ranks | 2 | 2 |\n| problems at most | 5 | 5 |",
    )
    assert "## Layers" not in text


@pytest.mark.parametrize(
    "library", [one for one in LIBRARIES if one.name not in OURS], ids=lambda library: library.name
)
def test_a_script_uses_the_library_alone(library: Any) -> None:
    problem = {"attention": EXAMPLE, "layers": LAYERS}[library.about]
    tree = ast.parse(script(library, condemned(library.subject.told(problem), rank=1), "1.0"))
    names = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= {"torch", *sys.stdlib_module_names}


def run_here(text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a script for one rank in this process; return its exit code."""
    shown: dict[str, Any] = {"__name__": "shown"}
    exec(compile(text, "shown.py", "exec"), shown)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(
        torch.multiprocessing, "spawn", lambda run, arguments, nprocs: run(0, *arguments)
    )
    try:
        code: int = shown["main"]()
    finally:
        torch.distributed.destroy_process_group()
    return code


PLAIN_LAYERS = """
class Pair(torch.nn.Module):
    def __init__(self, whole, **rest):
        super().__init__()
        shapes = (whole[f"{name}.weight"].T.shape for name in ("up", "down"))
        self.up, self.down = (torch.nn.Linear(*shape) for shape in shapes)
        self.load_state_dict(whole)

    def forward(self, x):
        return self.down(self.up(x))

    def finish(self):
        self.down.bias.grad *= 1


def prepare(comm, variant):
    pass
"""


@pytest.mark.parametrize(
    ("right", "wrong", "result"),
    [
        ("", "", "out"),
        ("self.down(self.up(x))", "self.down(1.01 * self.up(x))", "out"),
        ("self.up(x)", "self.up((x + x.detach()) / 2)", "d x"),
        ("*= 1", "*= 2", "d down.bias"),
        ("*= 1", "*= 2", "d up.weight"),
    ],
)
def test_a_script_of_layers_shows_the_result_that_it_is_about(
    right: str,
    wrong: str,
    result: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One rank runs ordinary layers. Faults of other results than the script's are ignored."""
    verdict = condemned({**layers.told(LAYERS), "shards": [[0, 1, 2, 3]]}, result)
    text = script(named("megatron-core"), verdict, "1.0")
    before, after = text[: text.index("# ---- the call")], text[text.index("# ---- the smallest") :]
    text = before + PLAIN_LAYERS.replace(right, wrong) + after
    code = int(bool(right) and result != "d up.weight")
    assert run_here(text, monkeypatch) == code
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("WRONG" if code else "right")
    assert len(said) == 7


def test_a_script_shows_a_fault_planted_in_a_library_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script runs on one rank in this process. The library of this fault is torch itself."""
    fault = next(fault for fault in FAULTS if fault.library == "torch ring")
    monkeypatch.setattr(fault.function, pkgutil.resolve_name(fault.function))  # undone later
    problem = {**told(EXAMPLE), "shards": [[0, 1, 2, 3]]}
    text = script(named(fault.library), condemned(problem), "1.0")
    for code, word in enumerate(("right", "WRONG")):
        assert run_here(text, monkeypatch) == code
        said = capsys.readouterr().out.splitlines()
        assert said[-1].startswith(word)
        assert len(said) == 5
        fault.plant()


@pytest.fixture
def data() -> Any:
    """Return the data of the committed report."""
    return json.loads((HERE / "REPORT.json").read_text())


def test_planted_faults_are_where_columns_compute(data: Any) -> None:
    """Each column of three adapters that passes any cell has a fault, in a cell that it passes."""
    for fault in FAULTS:
        assert fault.capability in named(fault.library).tried()
        assert data["verdicts"][fault.library][fault.capability]["verdict"] == "pass"
    seen = [(one["library"], one["what"], one["verdict"]) for one in data["planted"]]
    assert seen == [(fault.library, fault.what, "wrong") for fault in FAULTS]
    adapters = ("alst_ulysses", "accelerate_context_parallel", "megatron_tp_sp")
    columns = {one.name: data["verdicts"][one.name] for one in LIBRARIES if one.adapter in adapters}
    able = {
        name
        for name, column in columns.items()
        if any(verdict["verdict"] == "pass" for verdict in column.values())
    }
    assert able <= {fault.library for fault in FAULTS}


def test_a_column_is_of_the_adapter_that_is_committed(data: Any) -> None:
    """Each column of the report was made with the adapter of this commit.

    Change an adapter, and its column must be run again. Columns without a commit are left out.
    """
    told = {column["name"]: column for column in data["libraries"] if column["run"].get("commit")}
    assert not any(column["run"]["commit"]["dirty"] for column in told.values())
    wanted = {name: report.digest(named(name)) for name in told}
    assert {name: column["adapter_sha256"] for name, column in told.items()} == wanted
    recent = {"sp_core layers", "accelerate", "megatron-core"}
    assert set(told) >= recent | {fault.library for fault in FAULTS}


def test_the_committed_report_says_what_its_data_say(data: Any) -> None:
    assert (HERE / "REPORT.md").read_text() == "\n".join(report.markdown(data)) + "\n"
    assert [column["name"] for column in data["libraries"]] == [one.name for one in LIBRARIES]
    ours = [verdict for name in OURS for verdict in data["verdicts"][name].values()]
    assert {verdict["verdict"] for verdict in ours} == {"pass"}
    found = [verdict for column in data["verdicts"].values() for verdict in column.values()]
    wrong = [verdict for verdict in found if verdict["verdict"] == "wrong"]
    assert all(verdict["alone"].startswith("WRONG") for verdict in wrong)
    assert (HERE / "REPORT.png").stat().st_size > 10_000


@pytest.mark.parametrize("folder", [HERE, Path("no folder")])
def test_no_script_is_printed_for_a_cell_that_is_not_in_the_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--script", "no library", "forward", "--out", str(folder)]
    assert program.main(asked) == 2
    said = f"no library, forward: not in {folder}/REPORT.json, so nothing can be shown"
    assert said in capsys.readouterr().err


def test_what_was_not_tried_is_a_fault() -> None:
    verdicts = {
        "a library": {
            "full": {"verdict": "wrong"},
            "causal": {"verdict": "not tried"},
            "window": {"verdict": "refused"},
        }
    }
    assert program._faults(verdicts) == ["a library, causal: not tried"]
