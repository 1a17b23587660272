"""Small wrong edits of a source text: what each operator makes, where, and under which name."""

from __future__ import annotations

import pytest
from mutants.edits import edits

SILENT = '''"""A text of 3 words."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    LIMIT = 4
__all__ = ["f", "g"][0:2]
@cache(maxsize=5)
def f(x: "tuple[int, 3]") -> "Literal[7]":
    """Another, of 6."""
    y: "Array[8]" = x
    assert y > 9
    if y:
        raise ValueError(f"not {x + 1}" + str(x - 2))
    print(f"{x + 3}")
    return f"{y * 2}"
class A:
    def __repr__(self):
        return self.name[1:]
'''


def made(operator: str, text: str) -> list[str]:
    return [edit.after for edit in edits("a.py", text) if edit.operator == operator]


@pytest.mark.parametrize(
    ("operator", "text", "after"),
    [
        ("comparisons", "a < b", ["a <= b", "a >= b"]),
        ("comparisons", "0 <= a < n", ["0 < a < n", "0 > a < n", "0 <= a <= n", "0 <= a >= n"]),
        ("comparisons", "a == b", ["a != b"]),
        ("comparisons", "a not in b", ["a in b"]),
        ("comparisons", "a is None", ["a is not None"]),
        ("constants", "f(3, True, 2.0, '4')", ["f((4), True, 2.0, '4')", "f((2), True, 2.0, '4')"]),
        ("arithmetic", "a + b", ["a - b"]),
        ("arithmetic", "a * (b % c)", ["a // (b % c)", "a * (b // c)"]),
        ("arithmetic", "a + (1, 2)", []),
        ("arithmetic", "a += b", ["a -= b"]),
        ("logic", "a and b or c", ["(a or b) or c", "((a and b) and c)"]),
        ("logic", "not (a and b)", ["(a and b)", "not ((a or b))"]),
        ("conditions", "if a: b()", ["if True: b()", "if False: b()"]),
        ("conditions", "while a: b()", ["while False: b()"]),
        (
            "conditions",
            "x = [b for b in c if a]",
            ["x = [b for b in c if True]", "x = [b for b in c if False]"],
        ),
        ("conditions", "x = b if a else c", ["x = b if True else c", "x = b if False else c"]),
        ("statements", "f(x)", ["pass"]),
        ("statements", "a.b[c] = d", ["pass"]),
        ("statements", "a = f(x)", []),
        ("arguments", "f(a, b, c, d=e)", ["f(b, a, c, d=e)", "f(a, c, b, d=e)"]),
        ("arguments", "f((a), a, *b)", []),
        ("arguments", "max(a, b) + x.transpose(1, 2)", []),
        ("extrema", "min(a, b.max())", ["max(a, b.max())", "min(a, b.min())"]),
        ("slices", "a[b:3]", ["a[(b) + 1:3]", "a[(b) - 1:3]"]),
        ("returns", "def f(self, a, b):\n    return a", ["return b"]),
        ("returns", "def f():\n    return 1", []),
        ("jumps", "for a in b: break", ["for a in b: continue"]),
    ],
)
def test_an_operator_makes_these_edits(operator: str, text: str, after: list[str]) -> None:
    assert sorted(made(operator, text)) == sorted(after)


def test_what_people_read_and_checkers_check_stays() -> None:
    assert [(edit.operator, edit.before) for edit in edits("a.py", SILENT)] == [
        ("conditions", "if y:"),
        ("conditions", "if y:"),
        ("statements", 'print(f"{x + 3}")'),
        ("returns", 'return f"{y * 2}"'),
    ]


def test_an_edit_is_where_its_characters_are() -> None:
    text = 'def f(a):\n    é = "äöü" if (a +\n        1) else a - 2  # ß\n    return é'
    (edit,) = [edit for edit in edits("a.py", text) if edit.after.endswith("else a + 2  # ß")]
    assert (edit.before, edit.after) == ("1) else a - 2  # ß", "1) else a + 2  # ß")
    assert (edit.place, edit.lines) == ("f", (2, 3))
    assert edit.planted(text) == text.replace("a - 2", "a + 2")


def test_the_name_of_an_edit_moves_with_its_line() -> None:
    text = "def f(a):\n    b = a + 1\n    b = a + 1\n    return b\n"
    moved = f"import os\n\n\ndef g():\n    return os\n\n\n{text}"
    names = [edit.id for edit in edits("a.py", text)]
    assert len(set(names)) == len(names)
    assert names == [edit.id for edit in edits("a.py", moved) if edit.place == "f"]
