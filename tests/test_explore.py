"""The long search judges what it has drawn: each fault that it names is found, and nothing else."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from oracle import explore
from oracle.attention_features import attention_features, points, universe
from oracle.capabilities import BASE
from oracle.explore import EXAMPLES, LEAST_HITS, judge, told
from oracle.ways import offered, to_be_called, to_be_taken

from sp_core import Mask
from sp_core.testing.session import Remarks, Tally

POSSIBLE, IMPOSSIBLE = universe()
WAYS = [*to_be_taken(), *to_be_called()]


def complete() -> Tally:
    """A search without a fault, by the skin of its teeth."""
    features = (
        Counter(dict.fromkeys(points(), LEAST_HITS))
        + Counter(dict.fromkeys(WAYS, 1))
        + Counter({"scheme=ring": EXAMPLES})
    )
    pairs = Counter(dict.fromkeys(POSSIBLE, LEAST_HITS))
    return Tally(EXAMPLES, 0, Counter({3: EXAMPLES}), features, pairs, {"ring out": 0.5})


@pytest.mark.parametrize(
    ("named", "drawn"),
    [
        ("", ("ipc", "pinned", "pipelined", "staged")),
        ("host", ("ipc", "pinned", "pipelined", "staged")),
        ("device", ("device",)),
    ],
)
def test_tests_on_a_gpu_draw_transports_that_are_there_or_the_one_that_is_named(
    named: str, drawn: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SP_TRANSPORT", named)
    assert offered("cuda") == drawn


def test_a_complete_search_has_no_fault_and_tells_its_counts() -> None:
    assert judge(complete(), EXAMPLES) == []
    text = "\n".join(told(complete(), 7))
    assert f"{EXAMPLES} examples" in text
    assert "seed 7" in text
    assert "0.5 in ring out" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tally: setattr(tally, "examples", EXAMPLES - 1), "were wanted"),
        (
            lambda tally: tally.pairs.subtract([POSSIBLE[-1]]),
            f"4 examples, {LEAST_HITS} are needed",
        ),
        (lambda tally: tally.features.subtract([points()[-1]]), "grid"),
        (
            lambda tally: tally.features.subtract(["ring by window over window"]),
            "ring by window over window: never drawn",
        ),
        (
            lambda tally: tally.features.subtract(["all_gather by bruck on 8 ranks"]),
            "by bruck on 8 ranks: never drawn",
        ),
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


@pytest.mark.parametrize("fault", [False, True])
def test_the_command_judges_what_all_rounds_have_left(
    fault: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        complete(),
        Tally(3, 2, Counter({8: 3}), ratios={"ring out": 0.51 if fault else 0.1}),
    )
    first.features[points()[1]] += 1
    for place, tally in enumerate((first, second)):
        (tmp_path / f"{place}.json").write_text(tally.text())
    assert explore.main(["judge", "--into", str(tmp_path), "--seed", "9"]) == int(fault)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{EXAMPLES + 3} examples (+ 2 raw), seed 9"
    assert lines[1] == f"by ranks: {{3: {EXAMPLES}, 8: 3}}"
    assert lines[2].startswith(f"by scheme: {{'ring': {EXAMPLES}}}")
    assert (
        f"of {len(points())} remainders and grids the rarest is {points()[0]}: {LEAST_HITS}"
        in lines
    )
    assert (
        f"of {len(WAYS)} algorithms, each over every transport, the rarest was drawn 1 times"
        in lines
    )
    assert lines[-1].startswith("error over bound 0.51 in ring out") == fault
    assert lines[-2 if fault else -1] == ("1 faults" if fault else "no fault")


def test_the_command_draws_or_judges(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        explore.main(["guess", "--seed", "1"])
    assert stop.value.code == 2
    assert "choose from" in capsys.readouterr().err


@given(
    st.lists(st.dictionaries(st.sampled_from("abcd"), st.booleans()), max_size=6), st.integers(0, 6)
)
def test_counting_in_two_sessions_is_counting_in_one(
    examples: list[dict[str, bool]], cut: int
) -> None:
    whole, first, second = Tally(), Tally(), Tally()
    for place, example in enumerate(examples):
        for tally in (whole, first if place < cut else second):
            tally.count(Remarks(features=example))
            tally.examples, tally.raw, tally.tests = (
                tally.examples + 1,
                tally.raw + 2,
                tally.tests + 3,
            )
            tally.sizes[len(example)] += 1
    first.merge(second)
    assert first == whole
    assert Tally.parse(whole.text()) == whole


def own(**changes: Any) -> dict[str, str]:
    """Return the features of a problem on 3 ranks with 4 tokens each, but for `changes`."""
    size, usual = (
        changes.pop("size", 3),
        replace(BASE, seq_len=12, kv_len=12, layout="contiguous", kv_layout="contiguous"),
    )
    return attention_features("ring", replace(usual, **changes), size)


@pytest.mark.parametrize(
    ("window", "name"),
    [
        (None, "none"),
        (1, "narrower"),
        (2, "narrower"),
        (3, "shard - 1"),
        (4, "shard"),
        (5, "shard + 1"),
        (6, "wider"),
        (9, "2 shard + 1"),
        (10, "wider"),
    ],
)
def test_a_window_is_counted_by_the_length_of_a_shard(window: int | None, name: str) -> None:
    assert own(mask=Mask(causal=True, window=window))["window"] == name


@pytest.mark.parametrize(
    ("boundaries", "name"),
    [
        (None, "none"),
        ((0, 12), "one"),
        ((0, 4, 12), "on shards"),
        ((0, 4, 8, 12), "on shards"),
        ((0, 4, 9, 12), "on and inside"),
        ((0, 1, 12), "inside shards"),
    ],
)
def test_documents_are_counted_by_where_they_meet_shards(
    boundaries: tuple[int, ...] | None, name: str
) -> None:
    assert own(mask=Mask(causal=True, documents=boundaries))["documents"] == name


@pytest.mark.parametrize(
    ("length", "size", "name"),
    [
        (12, 3, "even"),
        (9, 3, "halves uneven"),
        (8, 3, "uneven"),
        (3, 3, "halves uneven"),
        (2, 3, "fewer than ranks"),
    ],
)
def test_tokens_are_counted_by_what_two_chunks_for_each_rank_leave(
    length: int, size: int, name: str
) -> None:
    assert own(seq_len=length, kv_len=length, size=size)["tokens"] == name


@pytest.mark.parametrize(
    ("kv_heads", "group", "split", "heads"),
    [
        (3, 1, "even", "MHA"),
        (6, 2, "even", "GQA"),
        (4, 1, "uneven", "MHA"),
        (2, 2, "copied", "GQA"),
        (1, 3, "copied", "MQA"),
        (1, 2, "fewer than ranks", "MQA"),
        (2, 1, "fewer than ranks", "MHA"),
    ],
)
def test_heads_are_counted_by_how_ranks_share_them(
    kv_heads: int, group: int, split: str, heads: str
) -> None:
    found = own(kv_heads=kv_heads, group=group)
    assert (found["head split"], found["heads"]) == (split, heads)


def test_counts_survive_a_file_and_add_up(tmp_path: Path) -> None:
    one = Tally(ratios={"out": 0.1, "dq": 0.3})
    one.count(Remarks(features={"layout=zigzag": True, "ranks=2": True, "grid 1 x 2": False}))
    (tmp_path / "one.json").write_text(one.text())
    read = Tally.parse((tmp_path / "one.json").read_text())
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


def test_rounds_go_on_until_enough_examples_have_been_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(explore, "Round", FakeRound)
    monkeypatch.setattr(FakeRound, "seeds", [], raising=False)
    assert explore.draw(tmp_path, 35, 0, 5, jobs=1).examples == 40
    assert FakeRound.seeds == [5, 6, 7, 8]
    monkeypatch.setattr(FakeRound, "fails", True)
    monkeypatch.setattr(FakeRound, "seeds", [], raising=False)
    with pytest.raises(SystemExit, match="has failed"):
        explore.draw(tmp_path, 100, 0, 7, jobs=1)
    assert FakeRound.seeds == [7, 8]


def test_a_round_that_failed_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = explore.Round.__new__(explore.Round)
    one.file, one.log = tmp_path / "one.json", tmp_path / "one.txt"
    one.log.write_text("what the session said")
    for code in (0, 1):  # without a file an exit code of 0 is no result either
        vars(one)["process"] = SimpleNamespace(returncode=code)
        with pytest.raises(SystemExit, match="failed"):
            one.tally()
        assert "what the session said" in capsys.readouterr().out
        if code == 0:
            one.file.write_text(Tally(examples=7).text())
    vars(one)["process"] = SimpleNamespace(returncode=0)
    assert one.tally() == Tally(examples=7)


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_round_that_does_not_end_is_killed(stubborn: bool) -> None:
    calls = []

    def wait(seconds: float | None = None) -> None:
        calls.append("wait")
        if stubborn and seconds is not None:
            raise subprocess.TimeoutExpired("pytest", seconds)

    one = explore.Round.__new__(explore.Round)
    process = {name: lambda name=name: calls.append(name) for name in ("terminate", "kill")}
    vars(one)["process"] = SimpleNamespace(wait=wait, **process)
    one.end()
    assert calls == ["terminate", "wait", *(["kill", "wait"] if stubborn else [])]
