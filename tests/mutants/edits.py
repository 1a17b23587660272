"""Make small wrong edits of a source text, such as a comparison off by one or a dropped statement.

Own operators, on the standard library's `ast`: those of cosmic-ray (8.7) and mutmut (3) know
neither swapped arguments, dropped statements, extrema nor bounds of slices, and edit hints,
decorators and messages, of which no law speaks. Their runners know one test command, or forks of
one process, for every edit alike; here an edit gets the tests that reach its line, and mpiexec.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
EXTREMA = {"min": "max", "max": "min"}
SYMMETRIC = {*EXTREMA, "transpose"}
HINTS = ("annotation", "returns", "decorator_list")
UNSPOKEN = ("__repr__", "__str__")
SEQUENCES = (ast.Tuple, ast.List, ast.JoinedStr)
"""Types that can be added and not subtracted: such an edit would be a TypeError at once."""


@dataclass(frozen=True)
class Edit:
    """One wrong edit.

    Args:
        file: path below the root of the repository.
        place: the function, such as "Sharding.zigzag"; empty at the level of the module.
        operator: the kind of edit.
        lines: first and last line of what is replaced, with the line in which its statement begins.
        start: offset in characters of what is replaced.
        stop: where it ends.
        new: what takes its place.
        before: the source lines without the edit.
        after: and with it.
        nth: among edits of the same function and lines.
        inside: whether it is in the body of a function; the rest happens when the module is
            imported.
    """

    file: str
    place: str
    operator: str
    lines: tuple[int, ...]
    start: int
    stop: int
    new: str
    before: str
    after: str
    nth: int = 0
    inside: bool = True

    @property
    def id(self) -> str:
        """Stays what it is as long as the lines do, wherever they move in the file."""
        key = (self.file, self.place, self.before, self.after, self.nth)
        return hashlib.blake2b(repr(key).encode(), digest_size=5).hexdigest()

    def planted(self, text: str) -> str:
        """The text of the file with the edit in it."""
        return text[: self.start] + self.new + text[self.stop :]


@dataclass(frozen=True)
class Scope:
    """Where the search is: the function, its parameters, and the line of the statement."""

    place: str = ""
    parameters: tuple[str, ...] = ()
    line: int = 1
    function: bool = False
    inside: bool = False


Variants = Iterator[tuple[Any, str]]


def edits(file: str, text: str) -> list[Edit]:
    """All edits of a source text, in the order of its lines."""
    position = _positions(text)
    found: list[Edit] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for scope, operator, node, new in _found(ast.parse(text), Scope()):
        start = position(node.lineno, node.col_offset)
        stop = position(node.end_lineno, node.end_col_offset)
        left, right = text.rfind("\n", 0, start) + 1, f"{text}\n".find("\n", stop)
        before = text[left:right].strip()
        after = f"{text[left:start]}{new}{text[stop:right]}".strip()
        lines = tuple(sorted({scope.line, *range(node.lineno, node.end_lineno + 1)}))
        place, nth = scope.place, seen[scope.place, before, after]
        seen[place, before, after] += 1
        found.append(
            Edit(file, place, operator, lines, start, stop, new, before, after, nth, scope.inside)
        )
    return sorted(found, key=lambda edit: (edit.start, edit.stop))


def _positions(text: str) -> Callable[[int, int], int]:
    """From a line and a column in bytes, as `ast` counts them, to an offset in characters."""
    lines = text.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    return lambda line, column: begins[line - 1] + len(lines[line - 1].encode()[:column].decode())


def _found(node: ast.AST, scope: Scope) -> Iterator[tuple[Scope, str, Any, str]]:
    if isinstance(node, ast.stmt):
        scope = replace(scope, line=node.lineno, inside=scope.function)
    for name, operator in OPERATORS.items():
        yield from ((scope, name, old, new) for old, new in operator(node, scope))
    inner = _entered(node, scope)
    for child in _children(node):
        yield from _found(child, inner)


def _entered(node: ast.AST, scope: Scope) -> Scope:
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        return scope
    place = f"{scope.place}.{node.name}".lstrip(".")
    if isinstance(node, ast.ClassDef):
        return Scope(place)
    listed = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    parameters = tuple(one.arg for one in listed if one.arg not in ("self", "cls", "ctx"))
    return Scope(place, parameters, node.lineno, function=True, inside=scope.inside)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts that do something: no hints, decorators, messages, assertions or texts."""
    for name, value in ast.iter_fields(node):
        parts = value if isinstance(value, list) else [value]
        yield from (
            part
            for part in parts
            if isinstance(part, ast.AST) and name not in HINTS and not _is_silent(part)
        )


def _is_silent(node: ast.AST) -> bool:
    named = isinstance(node, ast.FunctionDef) and node.name in UNSPOKEN
    listed = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return named or listed or typing or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)


def _text(node: ast.AST, **changed: object) -> str:
    """The source of a node in which some fields are different."""
    other = copy.copy(node)
    for name, value in changed.items():
        setattr(other, name, value)
    return ast.unparse(other)


def comparisons(node: ast.AST, _: Scope) -> Variants:
    """Off by one, or the other way round."""
    before = node.ops if isinstance(node, ast.Compare) else []
    for place, operation in enumerate(before):
        for other in COMPARISONS[type(operation)]:
            yield node, _text(node, ops=[*before[:place], other(), *before[place + 1 :]])


def constants(node: ast.AST, _: Scope) -> Variants:
    """An integer one more, one less."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield from ((node, f"({node.value + step})") for step in (1, -1))


def arithmetic(node: ast.AST, _: Scope) -> Variants:
    """The other operation."""
    sides = [getattr(node, name, None) for name in ("left", "right", "value")]
    added = any(isinstance(side, SEQUENCES) for side in sides)
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC and not added:
        yield node, _text(node, op=ARITHMETIC[type(node.op)]())


def logic(node: ast.AST, _: Scope) -> Variants:
    """`and` for `or`, and back; a `not` left out."""
    if isinstance(node, ast.BoolOp):
        yield node, f"({_text(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({ast.unparse(node.operand)})"


def conditions(node: ast.AST, _: Scope) -> Variants:
    """Always, or never."""
    tests: list[ast.expr] = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
    tests += node.ifs if isinstance(node, ast.comprehension) else []
    for test in tests:
        yield from (
            (test, word)
            for word in ("True", "False")
            if not (isinstance(node, ast.While) and word == "True")
        )


def statements(node: ast.AST, _: Scope) -> Variants:
    """Nothing is done: a call whose value nobody takes, `a += b`, `a.b = c`, `a[b] = c`."""
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    stored = isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets
    )
    if called or stored or isinstance(node, ast.AugAssign):
        yield node, "pass"


def _called(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def arguments(node: ast.AST, _: Scope) -> Variants:
    """Two neighbours swapped, where the order may matter."""
    given = node.args if isinstance(node, ast.Call) and _called(node.func) not in SYMMETRIC else []
    for place, (one, two) in enumerate(pairwise(given)):
        if (
            not isinstance(one, ast.Starred)
            and not isinstance(two, ast.Starred)
            and ast.dump(one) != ast.dump(two)
        ):
            yield node, _text(node, args=[*given[:place], two, one, *given[place + 2 :]])


def extrema(node: ast.AST, _: Scope) -> Variants:
    """The least for the greatest."""
    if isinstance(node, ast.Name) and node.id in EXTREMA:
        yield node, EXTREMA[node.id]
    if isinstance(node, ast.Attribute) and node.attr in EXTREMA:
        yield node, _text(node, attr=EXTREMA[node.attr])


def slices(node: ast.AST, _: Scope) -> Variants:
    """A bound one more, one less; where it is a number, `constants` has done so."""
    for bound in (node.lower, node.upper) if isinstance(node, ast.Slice) else ():
        if bound is not None and not isinstance(bound, ast.Constant):
            yield from ((bound, f"({ast.unparse(bound)}) {sign} 1") for sign in "+-")


def returns(node: ast.AST, scope: Scope) -> Variants:
    """An argument as it came."""
    if isinstance(node, ast.Return) and node.value is not None:
        others = [name for name in scope.parameters if name != ast.unparse(node.value)]
        yield from ((node.value, name) for name in others[:1])


def jumps(node: ast.AST, _: Scope) -> Variants:
    """`break` for `continue`, and back."""
    if isinstance(node, ast.Break | ast.Continue):
        yield node, "continue" if isinstance(node, ast.Break) else "break"


OPERATORS: dict[str, Callable[[ast.AST, Scope], Variants]] = {
    "comparisons": comparisons,
    "constants": constants,
    "arithmetic": arithmetic,
    "logic": logic,
    "conditions": conditions,
    "statements": statements,
    "arguments": arguments,
    "extrema": extrema,
    "slices": slices,
    "returns": returns,
    "jumps": jumps,
}
