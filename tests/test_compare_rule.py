"""Test the decision rule: its exact error rates, its symmetry, and that its self-test can fail."""

import argparse
import itertools
import math
import random
import runpy
import time
from fractions import Fraction
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, strategies as st
from kit import records as made

from benchmarks.compare import selftest
from benchmarks.compare.rule import (
    CONFIRM_AGREE,
    CONFIRM_PAIRS,
    MAX_DELTA,
    SCREEN_AGREE,
    SCREEN_PAIRS,
    Row,
    Side,
    Verdict,
    exit_code,
    judge,
    pairs_needed,
    raised_delta,
    summary,
    suspicion,
)
from benchmarks.launching import UsageError
from benchmarks.statistics import MISS, exact_interval

pytestmark = pytest.mark.mpi_skip  # plain arithmetic

BIG, DELTA = 0.5, 0.10

logs_of = st.floats(-1, 1).filter(lambda d: abs(d) > 1e-6)
screens = st.lists(logs_of, min_size=SCREEN_PAIRS, max_size=SCREEN_PAIRS)
confirms = st.lists(logs_of, min_size=CONFIRM_PAIRS, max_size=CONFIRM_PAIRS)
deltas = st.floats(0.01, MAX_DELTA)


def chance(throws: int, heads: int) -> float:
    """Return the probability that at least `heads` of `throws` fair coins show heads."""
    ways = sum(math.comb(throws, k) for k in range(heads, throws + 1))
    return float(ways / 2**throws)


def test_the_rule_over_all_throws_of_its_coins() -> None:
    """Of all 2^30 throws, the share of wrong verdicts is the product of both stages' tails."""
    found = dict.fromkeys(Verdict, 0)
    counts = itertools.product(range(SCREEN_PAIRS + 1), range(CONFIRM_PAIRS + 1))
    for slower, again in counts:
        screen, confirm = (
            [BIG] * k + [-BIG] * (n - k)
            for k, n in ((slower, SCREEN_PAIRS), (again, CONFIRM_PAIRS))
        )
        ways = math.comb(SCREEN_PAIRS, slower) * math.comb(CONFIRM_PAIRS, again)
        found[judge(screen, confirm, DELTA)] += ways
    assert sum(found.values()) == 2**30
    assert found[Verdict.REGRESSED] == found[Verdict.IMPROVED] == 56 * 6196
    for ways, pairs, agree in (
        (56, SCREEN_PAIRS, SCREEN_AGREE),
        (6196, CONFIRM_PAIRS, CONFIRM_AGREE),
    ):
        assert Fraction(ways, 2**pairs) == Fraction(chance(pairs, agree))


@given(screens, confirms, deltas)
def test_exchanging_base_and_head_mirrors_the_verdict(
    screen: list[float], confirm: list[float], delta: float
) -> None:
    there, back = (judge([s * d for d in screen], [s * d for d in confirm], delta) for s in (1, -1))
    mirrored = {Verdict.REGRESSED: Verdict.IMPROVED, Verdict.IMPROVED: Verdict.REGRESSED}
    if there in mirrored:
        assert back is mirrored[there]
    ours, theirs = (exact_interval([s * d for d in confirm]) for s in (1, -1))
    assert (theirs.low, theirs.high) == (-ours.high, -ours.low)


@given(screens, confirms, deltas, st.floats(0, 1))
def test_a_slower_head_is_never_judged_milder(
    screen: list[float], confirm: list[float], delta: float, more: float
) -> None:
    if judge(screen, confirm, delta) is Verdict.REGRESSED:
        first, again = ([d + more for d in logs] for logs in (screen, confirm))
        assert judge(first, again, delta) is Verdict.REGRESSED


@given(screens, confirms, deltas)
@example([0.09] * 10, [0.09] * 20, DELTA)
@example([0.3] * 10, [0.01] * 19 + [3.0], DELTA)  # a mean would be a regression
def test_what_a_verdict_says_is_in_its_interval(
    screen: list[float], confirm: list[float], delta: float
) -> None:
    verdict, logs = judge(screen, confirm, delta), confirm if suspicion(screen, delta) else screen
    found, limit = exact_interval(logs), math.log1p(delta)
    assert found.low <= found.median <= found.high
    if verdict is Verdict.REGRESSED:
        assert found.low > 0
        assert found.median >= limit
        assert sum(d > 0 for d in confirm) >= CONFIRM_AGREE
    assert (found.high < limit) or verdict is not Verdict.UNCHANGED
    if verdict is Verdict.INCONCLUSIVE:
        assert found.high >= limit
        assert (pairs_needed(logs, delta) or math.inf) > found.count


@pytest.mark.parametrize(
    ("pairs", "place"),
    [(1, 1), (3, 1), (6, 1), (9, 2), (10, 2), (12, 3), (20, 5), (30, 9)],
)
def test_the_interval_is_the_sign_test_inverted(pairs: int, place: int) -> None:
    """Zero lies outside the interval exactly if the sign test rejects it.

    With fewer than 6 values it can never reject, and the interval is the widest possible.
    """
    ordered = [float(n) for n in range(1, pairs + 1)]
    found = exact_interval(random.Random(3).sample(ordered, pairs))
    ends = (found.low, found.median, found.high, found.count)
    assert ends == (ordered[place - 1], (pairs + 1) / 2, ordered[-place], pairs)
    if pairs >= 6:
        assert chance(pairs, pairs - place + 1) <= MISS < chance(pairs, pairs - place)


def test_an_interval_of_many_values_needs_few_binomials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A binomial of n throws has n bits, so n**2 of them take seconds for a thousand values."""
    counted = Mock(side_effect=math.comb)
    monkeypatch.setattr(math, "comb", counted)
    found = exact_interval(range(400))
    assert (found.low, found.high) == (178, 221)
    assert counted.call_count <= 400


LIMIT = math.log1p(DELTA)


@pytest.mark.parametrize(
    ("screen", "needed"),
    [
        ([-2 * LIMIT, -2 * LIMIT, *[0.0] * 6, 2 * LIMIT, 2 * LIMIT], 40),
        ([-0.2, -0.2, -0.2, *[0.15] * 7], math.ceil(10 * (0.35 / 0.15) ** 2)),
        ([*[-1.0] * 3, *[LIMIT - 1e-4] * 5, 1.0, 1.0], None),
    ],
)
def test_more_pairs_would_decide(screen: list[float], needed: int | None) -> None:
    """Four times as many decide if the upper end is twice as far from the median as the limit."""
    assert judge(screen, (), DELTA) is Verdict.INCONCLUSIVE
    assert pairs_needed(screen, DELTA) == needed


@pytest.mark.parametrize(
    ("floor", "seconds", "delta"),
    [
        (0.1, [1.0] * 10, 0.1),
        (0.0, [2.0] * 5 + [3.0] * 5, 0.0),
        (0.1, [1.0, 1.1] * 5, pytest.approx(0.21)),
    ],
)
def test_a_change_of_speed_raises_no_delta_but_noise_does(
    floor: float, seconds: list[float], delta: float
) -> None:
    assert raised_delta(floor, seconds) == delta


@pytest.mark.parametrize(
    ("screen", "confirm", "verdict"),
    [
        ([BIG] * 10, [BIG] * 20, "regressed"),
        ([-BIG] * 10, [-BIG] * 20, "improved"),
        ([BIG] * 10, [BIG] * 15 + [-BIG] * 5, "ungateable"),
        ([BIG] * 10, [BIG] * 15 + [0.1] * 5, "ungateable"),  # its interval begins at 0.1
        ([0.1] * 10, (), "ungateable"),
    ],
)
def test_of_a_noisy_case_only_a_change_beyond_its_noise_is_judged(
    screen: list[float], confirm: list[float], verdict: str
) -> None:
    """Above `MAX_DELTA` the whole interval must lie beyond delta, not only the median."""
    assert judge(screen, confirm, MAX_DELTA + 0.05) == verdict
    if confirm[:1] == [BIG]:
        assert judge(screen, [BIG] * 16 + [0.1] * 4, MAX_DELTA) is Verdict.REGRESSED


@pytest.mark.parametrize("noise", [0.02, 0.15])
@pytest.mark.parametrize("drift", [0.15, 0.3, 0.5])
def test_base_against_itself_on_a_drifting_machine_is_hardly_ever_judged_wrongly(
    drift: float, noise: float
) -> None:
    """The rate is at most that of the coins, 2 * 56 * 6196 / 2^30: two or more in 1 of 7 runs."""
    draw, found = random.Random(drift).gauss, dict.fromkeys(Verdict, 0)
    for _ in range(1000):
        speeds = [draw(0, drift) for _ in range(SCREEN_PAIRS + CONFIRM_PAIRS)]
        base, head = ([speed + draw(0, noise) for speed in speeds] for _ in range(2))
        logs = [after - before for before, after in zip(base, head, strict=True)]
        delta = raised_delta(DELTA, [math.exp(speed) for speed in base[:SCREEN_PAIRS]])
        found[judge(logs[:SCREEN_PAIRS], logs[SCREEN_PAIRS:], delta)] += 1
    assert found[Verdict.UNGATEABLE] > 900
    assert found[Verdict.REGRESSED] + found[Verdict.IMPROVED] <= 1


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        ("no regression, improved", "Exit code 0: nothing regressed."),
        (
            "no regression, ungateable, inconclusive, new",
            "Exit code 0: 1 of 4 cases have not regressed; the others could not be judged.",
        ),
    ],
)
def test_the_summary_says_how_many_cases_were_not_judged(verdicts: str, told: str) -> None:
    rows = [made.verdict(name) for name in verdicts.split(", ")]
    assert told in " ".join(summary(made.result(*rows, exit_code=0)))


@pytest.mark.parametrize(("screen", "confirm"), [(9, 0), (11, 0), (10, 0), (10, 19), (10, 21)])
def test_another_number_of_pairs_is_refused(screen: int, confirm: int) -> None:
    with pytest.raises(ValueError, match="the rule is for"):
        judge([BIG] * screen, [BIG] * confirm, DELTA)


@pytest.mark.parametrize(
    ("verdicts", "code", "strict"),
    [
        ("no regression", 0, 0),
        ("no regression, improved, new, oversubscribed", 0, 0),
        ("no regression, regressed, missing", 1, 1),
        ("no regression, missing", 3, 3),
        ("no regression, mismatch", 3, 3),
        ("", 3, 3),
        ("new, oversubscribed", 3, 3),
        ("ungateable", 3, 3),
        ("no regression, inconclusive", 0, 4),
        ("inconclusive", 0, 4),
        ("no regression, ungateable", 0, 4),
        ("no regression, no regression, no regression, no regression, ungateable", 0, 0),
    ],
)
def test_exit_codes(verdicts: str, code: int, strict: int) -> None:
    found = [Verdict(name) for name in verdicts.split(", ") if name]
    assert (exit_code(found), exit_code(found, strict=True)) == (code, strict)


PLANTED = selftest.PLANTED_CASE


def row(case: str, ranks: int, verdict: str) -> Row:
    return made.verdict(verdict, case=case, ranks=ranks, delta=0.12)


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (
            [
                row(PLANTED, 1, "regressed"),
                row(PLANTED, 2, "regressed"),
                row("other", 2, "inconclusive"),
            ],
            0,
        ),
        (
            [
                row(PLANTED, 1, "ungateable"),
                row(PLANTED, 2, "regressed"),
                row(PLANTED, 4, "oversubscribed"),
            ],
            0,
        ),
        ([row(PLANTED, 1, "regressed"), row(PLANTED, 2, "inconclusive")], 1),
        ([row(PLANTED, 1, "regressed"), row("other", 2, "regressed")], 1),
        ([row(PLANTED, 1, "ungateable")], 1),
        ([], 1),
    ],
)
def test_the_selftest_knows_what_must_be_found(rows: list[Row], wrong: int) -> None:
    assert len(selftest.planted_found(made.result(*rows))) == wrong


@pytest.mark.parametrize(
    ("verdict", "share", "wrong"),
    [
        *((name, 0.8, 1) for name in ("regressed", "improved", "missing", "mismatch", "new")),
        ("no regression", 0.5, 1),
        ("no regression", 0.8, 0),
    ],
)
def test_the_selftest_knows_what_must_not_be_found(verdict: str, share: float, wrong: int) -> None:
    rows = [row("a", 1, "no regression"), row("b", 1, verdict)]
    found = selftest.nothing_found(made.result(*rows, gateable_share=share))
    assert len(list(found)) == wrong


def test_the_planted_work_takes_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the forward of the last rank gets work. The clock counts its readings."""
    path = tmp_path / selftest.PLANTED_IN
    path.parent.mkdir(parents=True)
    call = "def ring_attention(*, comm):\n    return [time.perf_counter() for _ in range(10)]\n"
    path.write_text(f"import time\nimport torch\n\n\n{call}")
    side = selftest.plant(Side("head", tmp_path, "HEAD", "a" * 40), 3.0)
    assert (side.sha, "200% more work" in side.ref) == (None, True)
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    attention = runpy.run_path(str(path))["ring_attention"]

    def took(rank: int) -> int:
        before = next(clock)
        attention(comm=argparse.Namespace(rank=rank, size=2))
        return next(clock) - before

    with torch.no_grad():
        others, last = took(0), took(1)
    assert (others, took(1)) == (13, 13)
    assert last == 11 * 3 + 2
    path.write_text("")
    with pytest.raises(UsageError, match="plant the work elsewhere"):
        selftest.plant(side, 1.5)


def test_as_much_is_planted_as_the_case_needs() -> None:
    assert selftest.planted_delta([made.result(row(PLANTED, 2, "no regression"))]) == 0.12
    assert selftest.planted_delta([]) == 0.10
