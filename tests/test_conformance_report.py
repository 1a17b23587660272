"""Launches of other libraries on trial, the scripts that show what is wrong alone, and the report."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import __main__ as program
from conformance import launching, report
from conformance.capabilities import Posed, told
from conformance.libraries import LIBRARIES, named
from conformance.script import script

from sp_core import Mask

HERE = Path(__file__).parent / "conformance"
EXAMPLE = Posed(
    *(1, 4, 4, 2, 1, 8, "float32", "contiguous", "contiguous", Mask(causal=True), None, 1.0),
    *("normal", "normal", (True, True, True), "plain", 1),
    shards=((0, 1), (2, 3)),
)


def cell(capability: str, ranks: int) -> dict[str, Any]:
    return {"library": "torch ring", "capability": capability, "ranks": ranks, "gradients": True}


def line(capability: str, ranks: int, verdict: str = "pass") -> dict[str, Any]:
    return {**cell(capability, ranks), "verdict": verdict, "examples": 5, "refused": 0, "error": 0.1}


def test_a_launch_that_dies_takes_one_cell_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On 2 ranks "causal" kills the launch; it is not tried again, and what is wrong on 2 ranks is not tried on 3."""
    tried: list[tuple[int, str]] = []

    def launch(size: int, folder: Path) -> str:
        cells = json.loads((folder / "setting.json").read_text())["cells"]
        with (folder / "verdicts.jsonl").open("w") as file:
            for _, capability in cells:
                tried.append((size, capability))
                file.write(
                    json.dumps({**line(capability, size), "begins": True} | {"verdict": ""}).replace('"verdict": "", ', "") + "\n"
                )
                if capability == "causal":
                    return "rank 1 died first: killed by SIGSEGV; last place: in the body of body"
                file.write(json.dumps(line(capability, size, "wrong" if capability == "GQA" else "pass")) + "\n")
        return ""

    monkeypatch.setattr(launching, "_launch", launch)
    found: launching.Found = {}
    launching.put_on_trial([named("torch ring")], (2, 3), 5, tmp_path, found)
    verdicts = {capability: verdict["verdict"] for (_, capability), verdict in found.items()}
    assert verdicts.pop("causal") == "crashed"
    assert verdicts.pop("GQA") == "wrong"
    assert set(verdicts.values()) == {"pass"}
    assert set(verdicts) | {"causal", "GQA"} == set(named("torch ring").tried())
    assert found["torch ring", "causal"]["states"].startswith("rank 1 died first: killed by SIGSEGV")
    assert tried.count((2, "causal")) == 1
    assert {(3, "causal"), (3, "GQA")}.isdisjoint(tried)
    assert found["torch ring", "MQA"]["ranks"] == [2, 3]
    assert found["torch ring", "MQA"]["examples"] == 10


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (["rank 0 waits for nobody: it is at a.py", "rank 1 waits for nobody: it is at b.py"], "slow"),
        (["rank 0 waits for nobody: it is at a.py", "rank 1 waits for rank 0"], "hung"),
        (["rank 0 waits for nobody: it is at a.py"] * 2, "hung"),
    ],
)
def test_ranks_that_all_compute_when_their_time_is_up_do_not_hang(
    said: list[str], verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes: list[int] = []

    def launch(size: int, folder: Path) -> str:
        sizes.append(size)
        return "\n".join(["==== the launch was ended: a rank has reached its time limit ====", *said])

    monkeypatch.setattr(launching, "_launch", launch)
    found: launching.Found = {}
    launching.put_on_trial([named("torch ring")], (2, 3), 5, tmp_path, found)
    assert {one["verdict"] for one in found.values()} == {verdict}
    assert sizes == [2]
    assert all("a.py" in one["states"] for one in found.values() if verdict == "slow")


@pytest.mark.parametrize("library", LIBRARIES[1:], ids=lambda library: library.name)
def test_a_script_uses_the_library_alone(library: Any) -> None:
    verdict = {**line("causal", 2, "wrong"), "result": "out", "rank": 1, "relative": 0.5, "problem": told(EXAMPLE)}
    tree = ast.parse(script(library, verdict, "1.0"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= {
        "__future__",
        "contextlib",
        "importlib",
        "math",
        "os",
        "sys",
        "tempfile",
        "torch",
        "types",
        "typing",
    }


@pytest.mark.parametrize(("fault", "code"), [("", 0), ('"scale": softmax_scale', 1), ('"is_causal": causal', 1)])
def test_a_script_shows_an_error_that_is_there_and_no_other(
    fault: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one rank, in this process: as the adapter is, and with a fault planted in its text."""
    problem = {**told(EXAMPLE), "shards": [[0, 1, 2, 3]]}
    verdict = {**line("causal", 1, "wrong"), "result": "out", "rank": 0, "relative": 1e-3, "problem": problem}
    text = script(named("torch ring"), verdict, "1.0")
    if fault:
        assert fault in text
        text = text.replace(fault, '"is_causal": not causal' if "causal" in fault else '"scale": 0.5')
    shown: dict[str, Any] = {"__name__": "shown"}
    exec(compile(text, "shown.py", "exec"), shown)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda run, arguments, nprocs: run(0, *arguments))
    try:
        assert shown["main"]() == code
    finally:
        torch.distributed.destroy_process_group()
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("WRONG" if code else "right")
    assert len(said) == 5


def test_the_committed_report_says_what_its_data_say() -> None:
    data = json.loads((HERE / "REPORT.json").read_text())
    assert (HERE / "REPORT.md").read_text() == report.markdown(data)
    assert [column["name"] for column in data["libraries"]] == [library.name for library in LIBRARIES]
    assert {verdict["verdict"] for verdict in data["verdicts"]["sp_core"].values()} == {"pass"}
    wrong = [v for column in data["verdicts"].values() for v in column.values() if v["verdict"] == "wrong"]
    assert all(v["alone"].startswith("WRONG") for v in wrong)
    assert (HERE / "REPORT.png").stat().st_size > 10_000


def test_what_was_not_tried_is_a_fault() -> None:
    verdicts = {"a library": {"full": {"verdict": "wrong"}, "causal": {"verdict": "not tried"}, "window": {"verdict": "refused"}}}
    assert program._faults(verdicts) == ["a library, causal: not tried"]
