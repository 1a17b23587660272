"""Test wrong edits: operators, the sample, the tests that reach an edit, a trial, the report."""

import ast
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kit.failing import assert_told
from mutants import generic, sample, tally
from mutants.edits import OPERATORS, Edit, edits
from mutants.reach import NEAR_SECONDS, Reached
from mutants.sample import Equivalent
from mutants.tally import Result, Score
from mutants.trial import Outcome
from studies import commands
from studies.commands import ROOT

from benchmarks.launching import parse

FILE = "sp_core/mask/blocks.py"


@pytest.fixture(scope="module")
def found() -> list[Edit]:
    return sample.candidates()


@pytest.fixture(scope="module")
def of_kit() -> list[Edit]:
    return sample.candidates(kit=True)


def test_every_operator_finds_something_in_the_library(found: list[Edit]) -> None:
    assert Counter(edit.operator for edit in found).keys() == OPERATORS.keys()
    assert len({edit.id for edit in found}) == len(found)


def test_every_file_of_the_package_is_in_the_library_or_in_the_kit(
    found: list[Edit], of_kit: list[Edit]
) -> None:
    library, kit = ({edit.file for edit in part} for part in (found, of_kit))
    assert not library & kit
    assert {sample.room_of(name) for name in kit} == {"launch", "testing"}
    paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / "sp_core").rglob("*.py")]
    assert {sample.room_of(name) for name in library | kit} == {*map(sample.room_of, paths)}


def test_an_edit_is_another_program(found: list[Edit]) -> None:
    for edit in random.Random(1).sample(found, 60):
        text = (ROOT / edit.file).read_text()
        assert ast.dump(ast.parse(edit.planted(text))) != ast.dump(ast.parse(text)), edit


@pytest.mark.parametrize("number", [1, 50, 500])
def test_a_sample_is_of_its_seed_and_has_the_share_of_every_room(
    found: list[Edit], number: int
) -> None:
    some = sample.drawn(found, number, 3)
    assert some == sample.drawn(found[::-1], number, 3)
    assert len({edit.id for edit in some}) == number
    assert {edit.id for edit in some} != {edit.id for edit in sample.drawn(found, number, 4)}
    rooms, given = (Counter(sample.room_of(edit.file) for edit in part) for part in (found, some))
    assert given == Counter(sample.shares(dict(rooms), number))


def test_a_small_room_gets_the_least_number_and_a_large_one_its_proportion() -> None:
    some = sample.shares({"a": 900, "b": 300, "c": 30, "d": 5}, 225)
    assert some == {"a": 150, "b": 50, "c": 20, "d": 5}
    assert sample.shares({"a": 3, "b": 4}, 10**6) == {"a": 3, "b": 4}
    assert sum(sample.shares({"a": 900, "b": 300, "c": 30}, 7).values()) == 7


def test_a_change_elsewhere_leaves_the_sample_as_it_is(found: list[Edit]) -> None:
    number, file = 300, found[0].file
    gone = {edit.id for place, edit in enumerate(found) if edit.file == file and not place % 2}
    before, after = (
        sample.drawn(part, number, 3)
        for part in (found, [edit for edit in found if edit.id not in gone])
    )
    kept = {edit.id for edit in after}
    assert (
        len([edit for edit in before if edit.file != file and edit.id not in kept]) < number // 50
    )


def test_what_is_said_to_go_unnoticed_is_there(found: list[Edit], of_kit: list[Edit]) -> None:
    known = sample.equivalents()
    assert sample.stale(known, [*found, *of_kit]) == []
    assert all(len(entry.reason.split()) > 3 for entry in known)
    assert len({replace(entry, reason="") for entry in known}) == len(known)
    edit = found[0]
    entry = Equivalent(edit.file, edit.place, edit.before, edit.after, "a reason")
    gone = replace(entry, before=f"{edit.before} ")
    assert sample.stale([entry, gone], found) == [gone]


def small(*lines: int, file: str = FILE, inside: bool = True) -> Edit:
    return Edit(file, "f", "constants", lines, 0, 1, "2", "x = 1", "x = 2", inside=inside)


def reached(seconds: dict[str, float], lines: dict[int, list[str]]) -> Reached:
    found = Reached()
    found.add(
        {"seconds": seconds, "lines": {FILE: {str(line): tests for line, tests in lines.items()}}}
    )
    return found


def test_narrow_and_quick_tests_come_first() -> None:
    seconds = {"wide": 1.0, "narrow": 1.0, "slow": 9.0, "p[1]": 0.9, "p[2]": 0.9, "other": 0.1}
    found = reached(
        seconds,
        {
            1: [*seconds],
            2: ["wide", "slow"],
            3: ["wide"],
            4: ["narrow", "wide", "slow", "p[1]", "p[2]"],
        },
    )
    assert found.tests(small(4)) == ["p[1]", "narrow", "p[2]", "wide", "slow"]
    assert found.tests(small(2, 3)) == ["wide", "slow"]


def test_what_runs_outside_of_tests_has_all_tests_of_files_that_reach_its_own() -> None:
    """Coverage credits such a line to the test that imports it first, but others depend on it."""
    found = reached(
        {"t::a": 1.0, "t::b": 2.0, "u::c": 3.0, "v::d": 4.0},
        {1: ["", "v::d"], 2: ["t::a"], 3: [""]},
    )
    assert found.tests(small(1, inside=False)) == ["t::b", "t::a", "v::d"]
    assert found.tests(small(3)) == ["t::b", "t::a", "v::d"]
    assert found.tests(small(1)) == ["v::d"]
    assert found.tests(small(4)) == []
    text = (
        "A = 1\ndef f(a=2):\n    def g(b=3):\n        return 4\n"
        "class B:\n    c = 5\n    d = lambda: 6\n"
    )
    inside = {
        edit.before: edit.inside for edit in edits("a.py", text) if edit.operator == "constants"
    }
    assert [before for before, is_inside in inside.items() if is_inside] == [
        "def g(b=3):",
        "return 4",
    ]
    assert found.tests(small(9)) == []
    assert found.tests(small(1, file="sp_core/sharding.py")) == []


def test_a_test_that_kills_nothing_without_an_edit_kills_nothing_with_one() -> None:
    assert reached({"green": 1.0}, {1: ["green", "red"]}).tests(small(1)) == ["green"]


def test_an_edit_has_the_stages_whose_tests_reach_it() -> None:
    found = reached({"t::a": 1.0, "t::c": NEAR_SECONDS}, {1: ["t::a", "t::c"]})
    found.ranks = reached({"t::b": 2.0, "t::d": NEAR_SECONDS}, {1: ["t::d"], 2: ["t::b", "t::d"]})
    stages = [
        [(stage.name, stage.tests) for stage in found.stages(small(line))] for line in (1, 2, 3)
    ]
    assert stages == [
        [("near", ["t::a"]), ("near ranks", ["t::d"]), ("far", ["t::c"])],
        [("near ranks", ["t::b"]), ("ranks", ["t::d"])],
        [],
    ]
    assert generic.attempt(small(3), found, "far") == Outcome(
        "survived", "far", words="tests that reach it: none"
    )


def test_the_first_tests_take_no_longer_than_said() -> None:
    found = reached({"a": NEAR_SECONDS / 2, "b": NEAR_SECONDS / 2, "c": 0.1}, {1: ["a", "b", "c"]})
    assert [found.near(tests) for tests in (["a", "b", "c"], ["a", "b"], ["c"])] == [2, 2, 1]
    assert reached({"a": 2 * NEAR_SECONDS}, {}).near(["a"]) == 1


@pytest.mark.parametrize(
    ("killed", "all_of_them", "low", "high"),
    [(10, 10, 0.7225, 1.0), (95, 100, 0.8882, 0.9785), (0, 0, 0.0, 1.0)],
)
def test_wilsons_interval(killed: int, all_of_them: int, low: float, high: float) -> None:
    assert Score(killed, all_of_them).interval == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("survivors", "suffice"),
    [((0, 0), True), ((3, 0), True), ((4, 0), False), ((0, 1), True), ((0, 2), False)],
)
def test_enough_are_killed_in_each_room_and_in_all(
    survivors: tuple[int, int], suffice: bool
) -> None:
    """The rooms have 80 and 20 edits. At least 95 % of each room and 97 % of all must be killed."""
    results = [
        Result(small(line, file=file), Outcome("survived" if line < alive else "killed"))
        for file, count, alive in zip((FILE, "sp_core/mesh.py"), (80, 20), survivors, strict=True)
        for line in range(count)
    ]
    assert tally.suffices(results) == suffice


def test_a_report_leaves_out_what_goes_unnoticed_and_names_survivors() -> None:
    entry = Equivalent(FILE, "f", "x = 1", "x = 2", "it is only slower")
    killed, survived = (
        Outcome("killed", "near", "test_mask.py::test_x", seconds=4.0),
        Outcome("survived", "ranks"),
    )
    other = small(5, file="sp_core/sharding.py")
    results = [
        Result(small(1), killed),
        Result(other, survived),
        Result(other, survived, entry),
    ]
    assert (tally.score(results).killed, tally.score(results).all) == (1, 2)
    assert tally.score([*results, Result(other, tally.OPEN)]) == tally.score(results)
    assert tally.wrong([*results, Result(small(1), killed, entry)]) == [
        Result(small(1), killed, entry)
    ]
    text = "\n".join(tally.markdown(results, "Seed 1"))
    assert_told(
        text,
        "Seed 1: 1 of 2, 50.0%",
        "| mask | 1 | 0 | 1 | 100.0% |",
        "| sp_core | 2 | 1 | 0 | 0.0% |",
        "| constants | 3 | 1 | 1 | 50.0% |",
        f"## Survivors\n\n- `{other.id}` sp_core/sharding.py f: `x = 1` to `x = 2`.\n",
    )
    _, _, apart = text.partition("## Equivalent")
    assert "it is only slower" in apart
    assert [result.as_dict()["verdict"] for result in results] == ["killed", "survived", "survived"]


def test_the_seed_is_the_date_and_each_sample_has_its_own_number_and_report() -> None:
    library, kit = (
        parse("", "", generic.OPTIONS, arguments) for arguments in ([], ["--kit", "--seed", "5"])
    )
    for options in library, kit:
        generic.complete(options)
    assert re.fullmatch(r"20\d{6}", str(library.seed))
    assert (library.number, library.name) == (500, "generic")
    assert (kit.seed, kit.number, kit.name) == (5, 150, "generic_kit")


def test_a_survivor_of_an_early_stage_is_tried_by_the_later_ones() -> None:
    assert [
        generic.is_final(Outcome("survived", stage), "far") for stage in ("near", "far", "ranks")
    ] == [False, True, True]
    assert all(
        generic.is_final(Outcome(verdict, "near"), "ranks")
        for verdict in ("killed", "hung", "broken")
    )


def test_edits_are_chosen_by_room_operator_file_and_id() -> None:
    some = [small(1), small(2, file="sp_core/sharding.py")]
    assert generic.selected(some, []) == some
    for name in ("mask", FILE, some[0].id):
        assert generic.selected(some, [name]) == some[:1]
    assert generic.selected(some, ["constants", "mask"]) == some


@pytest.mark.parametrize(
    ("only", "apart", "told"),
    [("no such room", "true", "no edit of the sample is chosen"), ("mask", "false", "To try")],
)
def test_a_report_stays_if_no_edit_is_chosen_or_can_be_tried(
    only: str,
    apart: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    substitute: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    substitute(sample, candidates=lambda **_: [small(1)], equivalents=list)
    monkeypatch.setattr(generic, "_reached", pytest.fail)
    monkeypatch.setattr(commands, "APART", (apart,))
    (journal := tmp_path / "generic.jsonl").touch()
    assert generic.main(["--only", only, "--out", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [journal]


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
    made = [edit.after for edit in edits("a.py", text) if edit.operator == operator]
    assert sorted(made) == sorted(after)


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
