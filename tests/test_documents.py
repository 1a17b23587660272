"""The command that compares packed documents with plain SDPA: what makes it fail."""

from __future__ import annotations

from benchmarks.contests import documents
from benchmarks.contests.contest import Wrong


def told(name: str, quickest: float, **more: float) -> list[Wrong]:
    """Return the complaints about contestants that all take `quickest` times the ideal."""
    samples = {f"ring/{layout}": [quickest] * 3 for layout in documents.LAYOUTS}
    samples |= {f"slow/{layout}": [9.0] * 3 for layout in documents.LAYOUTS}
    samples |= {documents.IDEAL: [1.0] * 3, documents.ALONE: [2.0] * 3}
    samples |= {one.replace("_", "/"): [seconds] * 3 for one, seconds in more.items()}
    check = {"status": "wrong" if quickest < 0.5 else "ok"}
    found = {"checks": {"ring/zigzag": check}, "samples_s": samples}
    shown = documents.show({"launches": [{"ranks": 2, "mask": name, **found}]})
    return [part for part in shown if isinstance(part, Wrong)]


def test_the_quickest_scheme_of_each_layout_is_judged() -> None:
    assert not told("8 documents", 1.1)
    assert len(told("8 documents", 1.2)) == len(documents.LAYOUTS)
    assert len(told("8 documents", 1.1, ring_striped=1.2)) == 1


def test_a_wrong_result_is_told() -> None:
    assert len(told("8 documents", 0.4)) == 1


def test_the_second_rank_must_help_in_a_window() -> None:
    """Twice the ideal on one rank is the time of `ALONE` here."""
    assert not told("window", 1.15)
    assert len(told("window", 1.25)) == 1


def test_balanced_must_not_be_slower_than_zigzag_on_skewed_lengths() -> None:
    assert not told("skewed", 1.0)
    assert len(told("skewed", 1.0, ring_zigzag=0.9)) == 1


def test_balanced_shares_the_work() -> None:
    for name, mask in documents.masks().items():
        assert documents.work("balanced", 2, mask) <= documents.WORK, name
    assert documents.work("contiguous", 2, documents.masks()["1 documents"]) > 1.4
