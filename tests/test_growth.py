"""The command that fits how costs grow: its exponents, and what makes it fail."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.contests import growth
from benchmarks.contests.contest import Wrong

SIZES = (64, 256, 1024, 4096)


def wrong(*lines: Any, **more: Any) -> list[Wrong]:
    launches = [{"name": "computed", "lines": lines}, *more.get("launches", ())]
    return [part for part in growth.show({"launches": launches}) if isinstance(part, Wrong)]


@pytest.mark.parametrize("degree", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_found_beside_a_constant_at_small_sizes(degree: float) -> None:
    values = [1e9, *(3 * size**degree for size in SIZES[1:])]
    assert growth.exponent(SIZES, values) == pytest.approx(degree)


def test_a_quadratic_cost_is_above_its_limit_and_a_linear_one_is_not() -> None:
    linear, quadratic = [float(P) for P in SIZES], [1e-6 * P * P for P in SIZES]
    assert not wrong(growth.line("linear", SIZES, linear, linear, allowed=growth.LINEAR))
    told = wrong(growth.line("quadratic", SIZES, quadratic, linear, quadratic, allowed=1.1))
    assert len(told) == 1
    assert "2.000" in told[0]


def test_a_time_above_its_bound_is_told_though_it_grows_slowly() -> None:
    told = wrong(growth.line("slow", SIZES, [21.0] * 4, allowed=growth.FLAT, bound=20.0))
    assert len(told) == 1
    assert "at 4096" in told[0]


def test_live_bytes_must_fall_with_the_ranks() -> None:
    """A tenth more of S/P is allowed; of keys that each rank gathers no more than that of S."""

    def launches(name: str, *peaks: float) -> list[dict[str, Any]]:
        ranks = (16, 32, 64)
        return [
            {"name": f"P = {size}", "ranks": size, "peaks": {name: peak}, "own": 1}
            for size, peak in zip(ranks, peaks, strict=True)
        ]

    assert not wrong(launches=launches("ring", 400, 205, 105))
    assert len(wrong(launches=launches("ring", 400, 300, 200))) == 1
    assert not wrong(launches=launches("allgather_kv", 400, 400, 400))
    assert len(wrong(launches=launches("allgather_kv", 400, 800, 1600))) == 1


def test_costs_of_one_rank_follow_their_limits() -> None:
    """Of fewer ranks than the command takes; nothing is timed."""
    found = [growth.computed_for(size) for size in (64, 256)]
    for key, first in found[0].items():
        if not key[0].startswith("bytes"):  # constants rule sizes of objects of few ranks
            slope = growth.exponent((64, 256), (first, found[1][key]))
            assert slope <= key[1] + 0.05, key
