"""Make small wrong edits of a source text, such as a comparison off by one or a dropped statement.

The operators are our own, on the standard library's `ast`. Those of cosmic-ray (8.7) and mutmut (3)
have no swapped arguments, dropped statements, extrema or bounds of slices. They also edit hints,
decorators and messages, which no law tests. Their runners run the same test command, or forks of
one process, for every edit. Here each edit runs the tests that reach its line, also by mpiexec.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
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
"""Node types whose values can be added but not subtracted: `-` for `+` would raise TypeError."""


@dataclass(frozen=True)
class Edit:
    """One wrong edit.

    Args:
        file: path below the root of the repository.
        place: the function, such as "Sharding.zigzag"; empty at the level of the module.
        operator: the kind of edit.
        lines: the numbers of the replaced lines, and of the line in which their statement begins.
        start: the offset at which the replaced text begins, in characters.
        stop: the offset at which it ends, in characters.
        new: the text that replaces it.
        before: the source lines without the edit.
        after: the source lines with the edit.
        nth: the number of this edit among those with the same function, `before` and `after`.
        inside: whether the edit is in the body of a function. Other code runs when the module is
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
        """Return a digest that stays the same while the lines do, even if they move in the file."""
        key = (self.file, self.place, self.before, self.after, self.nth)
        return hashlib.blake2b(repr(key).encode(), digest_size=5).hexdigest()

    def planted(self, text: str) -> str:
        """Return the text of the file with the edit in it."""
        return text[: self.start] + self.new + text[self.stop :]


@dataclass(frozen=True)
class Scope:
    """The position of the search: the function, its parameters, and the line of the statement."""

    place: str = ""
    parameters: tuple[str, ...] = ()
    line: int = 1
    function: bool = False
    inside: bool = False


Variants = Iterator[tuple[Any, str]]


def edits(file: str, text: str) -> list[Edit]:
    """Return all edits of a source text, in the order of its lines."""
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
    """Return a function from `ast`'s line and column in bytes to an offset in characters."""
    lines = text.splitlines(keepends=True)
    begins = list(accumulate(map(len, lines), initial=0))
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
    """Yield the child nodes to edit, without hints, decorators, errors, assertions and texts."""
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
    """Return the source of a node after replacing some of its fields."""
    return ast.unparse(type(node)(**dict(ast.iter_fields(node)) | changed))


def comparisons(node: ast.AST, _: Scope) -> Variants:
    """Replace a comparison by its neighbour, such as `<=` for `<`, or by its opposite."""
    before = node.ops if isinstance(node, ast.Compare) else []
    for place, operation in enumerate(before):
        for other in COMPARISONS[type(operation)]:
            yield node, _text(node, ops=[*before[:place], other(), *before[place + 1 :]])


def constants(node: ast.AST, _: Scope) -> Variants:
    """Make an integer one greater or one smaller."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield from ((node, f"({node.value + step})") for step in (1, -1))


def arithmetic(node: ast.AST, _: Scope) -> Variants:
    """Replace an arithmetic operator as `ARITHMETIC` says."""
    sides = [getattr(node, name, None) for name in ("left", "right", "value")]
    added = any(isinstance(side, SEQUENCES) for side in sides)
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC and not added:
        yield node, _text(node, op=ARITHMETIC[type(node.op)]())


def logic(node: ast.AST, _: Scope) -> Variants:
    """Replace `and` by `or` or `or` by `and`, or leave out a `not`."""
    if isinstance(node, ast.BoolOp):
        yield node, f"({_text(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({ast.unparse(node.operand)})"


def conditions(node: ast.AST, _: Scope) -> Variants:
    """Replace a condition by True or False, but never that of a `while` by True."""
    tests: list[ast.expr] = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
    tests += node.ifs if isinstance(node, ast.comprehension) else []
    for test in tests:
        yield from (
            (test, word)
            for word in ("True", "False")
            if not (isinstance(node, ast.While) and word == "True")
        )


def statements(node: ast.AST, _: Scope) -> Variants:
    """Drop a call whose result is not used, or `a += b`, `a.b = c` or `a[b] = c`."""
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    stored = isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets
    )
    if called or stored or isinstance(node, ast.AugAssign):
        yield node, "pass"


def _called(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def arguments(node: ast.AST, _: Scope) -> Variants:
    """Swap two neighbouring arguments of a call if their order may matter."""
    given = node.args if isinstance(node, ast.Call) and _called(node.func) not in SYMMETRIC else []
    for place, (one, two) in enumerate(pairwise(given)):
        if (
            not isinstance(one, ast.Starred)
            and not isinstance(two, ast.Starred)
            and ast.dump(one) != ast.dump(two)
        ):
            yield node, _text(node, args=[*given[:place], two, one, *given[place + 2 :]])


def extrema(node: ast.AST, _: Scope) -> Variants:
    """Replace `min` by `max` or `max` by `min`."""
    if isinstance(node, ast.Name) and node.id in EXTREMA:
        yield node, EXTREMA[node.id]
    if isinstance(node, ast.Attribute) and node.attr in EXTREMA:
        yield node, _text(node, attr=EXTREMA[node.attr])


def slices(node: ast.AST, _: Scope) -> Variants:
    """Make a bound of a slice one greater or smaller; `constants` edits bounds that are numbers."""
    for bound in (node.lower, node.upper) if isinstance(node, ast.Slice) else ():
        if bound is not None and not isinstance(bound, ast.Constant):
            yield from ((bound, f"({ast.unparse(bound)}) {sign} 1") for sign in "+-")


def returns(node: ast.AST, scope: Scope) -> Variants:
    """Return the first parameter of the function instead of the result."""
    if isinstance(node, ast.Return) and node.value is not None:
        others = [name for name in scope.parameters if name != ast.unparse(node.value)]
        yield from ((node.value, name) for name in others[:1])


def jumps(node: ast.AST, _: Scope) -> Variants:
    """Replace `break` by `continue` or `continue` by `break`."""
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
