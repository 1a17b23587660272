"""Test that the documented table of what each scheme can do is true."""

from pathlib import Path

import pytest
from oracle import capabilities

ROOT = Path(__file__).resolve().parents[1]


def test_the_documented_table_is_what_the_schemes_do() -> None:
    _, shown, _ = (
        (ROOT / "docs" / "schemes.md")
        .read_text()
        .split("<!-- PYTHONPATH=tests python -m oracle.capabilities -->")
    )
    what_to_do = "put what PYTHONPATH=tests python -m oracle.capabilities prints into the page"
    assert shown.strip() == capabilities.table(), what_to_do


def test_a_scheme_that_is_wrong_gets_no_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    right = capabilities.columns

    def wrong(mesh: capabilities.Mesh) -> dict[str, capabilities.Scheme]:  # type: ignore[name-defined]
        schemes = right(mesh)
        ring = schemes["ring"]
        return {**schemes, "ring": lambda *qkv, **options: ring(*qkv, **{**options, "mask": None})}

    monkeypatch.setattr(capabilities, "columns", wrong)
    questions = dict(capabilities.questions())
    with pytest.raises(AssertionError, match="capability out"):
        capabilities.on_ranks(questions["causal"])
