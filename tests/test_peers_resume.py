"""A comparison with peers that was interrupted loses nothing, and can be taken up again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_peers import OURS, launched

from benchmarks.peers import __main__ as peers
from benchmarks.peers.setting import Setting


def test_an_interruption_keeps_what_is_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answers = iter([launched({OURS: 1.0, "deepspeed ulysses": 2.0}, 1024)])

    def run(*_: object) -> dict[str, Any]:
        try:
            return next(answers)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(peers, "run_once", run)
    out = tmp_path / "folder" / "peers.json"
    assert peers.main(["--seq", "1024", "--out", str(out)]) == 130
    assert len(json.loads(out.read_text())["launches"]) == 1
    shown = capsys.readouterr().out
    assert "interrupted" in shown
    assert "2.000 [2.000, 2.000]" in shown


def test_an_interrupted_comparison_can_be_resumed_but_not_by_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seeds: list[int] = []

    def run(chosen: Setting, timeout: float) -> dict[str, Any]:
        seeds.append(chosen.seed)
        return launched({OURS: 1.0}, 1024)

    monkeypatch.setattr(peers, "run_once", run)
    out = tmp_path / "peers.json"
    options = ["--seq", "1024", "--out", str(out), "--resume"]
    assert [peers.main([*options, "--launches", count]) for count in ("2", "3")] == [0, 0]
    assert seeds == [0, 1, 2]
    assert len(json.loads(out.read_text())["launches"]) == 3
    assert peers.main([*options, "--rounds", "1"]) == 2
    assert "differs in setting" in capsys.readouterr().err
    out.write_text("{")
    assert peers.main(options) == 2
    assert "cannot be read" in capsys.readouterr().err
