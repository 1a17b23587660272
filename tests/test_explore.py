"""The long search judges what it has drawn: each fault that it names is found, and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sp_core.testing import explore
from sp_core.testing.attention_features import points, universe
from sp_core.testing.explore import EXAMPLES, LEAST_HITS, judge, told
from sp_core.testing.tally import Tally
from sp_core.testing.ways import to_be_called, to_be_taken

POSSIBLE, IMPOSSIBLE = universe()
WAYS = [*to_be_taken(), *to_be_called()]


def complete() -> Tally:
    """A search without a fault, by the skin of its teeth."""
    features = Counter(dict.fromkeys(points(), LEAST_HITS)) + Counter(dict.fromkeys(WAYS, 1)) + Counter({"scheme=ring": EXAMPLES})
    pairs = Counter(dict.fromkeys(POSSIBLE, LEAST_HITS))
    return Tally(EXAMPLES, 0, Counter({3: EXAMPLES}), features, pairs, {"ring out": 0.5})


def test_a_complete_search_has_no_fault_and_tells_its_counts() -> None:
    assert judge(complete(), EXAMPLES) == []
    text = "\n".join(told(complete(), 7))
    assert f"{EXAMPLES} examples" in text
    assert "seed 7" in text
    assert "0.5 in ring out" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tally: vars(tally).update(examples=EXAMPLES - 1), "were wanted"),
        (lambda tally: tally.pairs.subtract([POSSIBLE[-1]]), f"4 examples, {LEAST_HITS} are needed"),
        (lambda tally: tally.features.subtract([points()[-1]]), "grid"),
        (lambda tally: tally.features.subtract(["ring by window over window"]), "ring by window over window: never drawn"),
        (lambda tally: tally.features.subtract(["all_gather by bruck on 8 ranks"]), "by bruck on 8 ranks: never drawn"),
        (lambda tally: tally.pairs.update(next(iter(IMPOSSIBLE.values()))[:1]), "was drawn, but"),
        (lambda tally: tally.pairs.update([("layout=new", "ranks=1")]), "no pair of known values"),
        (lambda tally: tally.ratios.update({"ring dq": 0.51}), "ring dq"),
        (lambda tally: tally.ratios.update({"ring dq": float("nan")}), "ring dq"),
    ],
)
def test_each_fault_is_found(change: Any, said: str) -> None:
    tally = complete()
    change(tally)
    (fault,) = judge(tally, EXAMPLES)
    assert said in fault


def test_a_shorter_search_needs_fewer_hits() -> None:
    tally = complete()
    tally.pairs = Counter(dict.fromkeys(POSSIBLE, LEAST_HITS - 3))
    assert judge(tally, EXAMPLES * 2 // LEAST_HITS) == []
    assert len(judge(tally, EXAMPLES)) == len(POSSIBLE)


def test_counts_survive_a_file_and_add_up(tmp_path: Path) -> None:
    one = Tally(ratios={"out": 0.1, "dq": 0.3})
    one.count({"layout=zigzag": True, "ranks=2": True, "grid 1 x 2": False})
    one.write(tmp_path / "one.json")
    read = Tally.read(tmp_path / "one.json")
    assert read == one
    read.merge(Tally(examples=3, sizes=Counter({2: 3}), ratios={"out": 0.2}))
    assert (read.examples, read.sizes, read.ratios) == (3, {2: 3}, {"out": 0.2, "dq": 0.3})
    assert read.pairs == {("layout=zigzag", "ranks=2"): 1}
    assert read.features["grid 1 x 2"] == 1


class FakeRound:
    """A round that runs nothing and has drawn 10 examples."""

    seeds: list[int]
    fails = False

    def __init__(self, folder: Path, ranks: int, seed: int) -> None:
        self.file, self.began, self.stopped = folder / f"{seed}.json", 0.0, False
        self.seeds.append(seed)

    def ended(self) -> bool:
        return True

    def tally(self) -> Tally:
        if self.fails and self.seeds[-1] == 8:
            raise SystemExit("this round has failed")
        return Tally(examples=10)

    def end(self) -> None:
        self.stopped = True


def test_rounds_go_on_until_enough_examples_have_been_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(explore, "Round", FakeRound)
    monkeypatch.setattr(FakeRound, "seeds", [], raising=False)
    assert explore.draw(tmp_path, 35, 0, 5, jobs=1).examples == 40
    assert FakeRound.seeds == [5, 6, 7, 8]
    monkeypatch.setattr(FakeRound, "fails", True)
    monkeypatch.setattr(FakeRound, "seeds", [], raising=False)
    with pytest.raises(SystemExit, match="has failed"):
        explore.draw(tmp_path, 100, 0, 7, jobs=1)
    assert FakeRound.seeds == [7, 8]


def test_a_round_that_failed_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = explore.Round.__new__(explore.Round)
    one.file, one.log = tmp_path / "one.json", tmp_path / "one.txt"
    one.log.write_text("what the session said")
    for code in (0, 1):  # without a file an exit code of 0 is no result either
        vars(one)["process"] = SimpleNamespace(returncode=code)
        with pytest.raises(SystemExit, match="failed"):
            one.tally()
        assert "what the session said" in capsys.readouterr().out
        if code == 0:
            Tally().write(one.file)
