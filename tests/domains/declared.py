"""Describe domains as data: factors cut into named parts, rows of parts, and drawn values."""

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from typing import Any

import torch
from oracle.collective_cases import in_memory
from torch import Tensor

import sp_core as sp
from sp_core import progress
from sp_core.testing import device, record_ratio
from sp_core.testing.tolerance import check_close

Values = dict[str, Any]
Draw = Callable[[random.Random, Values], Any]
Parts = dict[str, Draw]
Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


@dataclass
class Call:
    """Describe one call of a public function on one rank.

    Attributes:
        function: the function that is called.
        arguments: this rank's arguments, by parameter.
        judge: compares the result, and gradients where there are any, with a reference that does
            not communicate.
        positional: parameters that cannot be passed by name.
    """

    function: Callable[..., Any]
    arguments: Values
    judge: Callable[[Any], None]
    positional: tuple[str, ...] = ()

    def __call__(self) -> Any:
        named = {
            name: value for name, value in self.arguments.items() if name not in self.positional
        }
        result = self.function(*(self.arguments[name] for name in self.positional), **named)
        if not isinstance(result, sp.Pending):
            late = [comm for comm in progress.of_this_rank()._busy if comm._pending]
            assert not late, "the call has returned before its messages were through"
        return result


@dataclass(frozen=True)
class Subject:
    """Describe a public call and its domain.

    Attributes:
        name: the function's name, as `public` finds it.
        factors: the parts of each factor. A factor is named "parameter" or "parameter.aspect", or
            "(situation)" if it is no parameter. The first parts of all factors make a valid row.
        prepare: opens a mesh on a communicator of `ranks(values)` ranks and yields the call.
        ranks: returns how many ranks drawn values need.
        covers: further public names whose parameters are among these factors, such as methods of
            the object that the call makes.
        outside: parameters that have no domain, each with the reason.
        allowed: differences between ranks that are valid and change the result, as `differing`
            names them. They are not tried.
        own_results: names of differences that may give each rank the result of its own argument
            if the mesh has `check="off"`.
        alone: whether the ranks do not agree on the arguments: a wrong one is an error of its rank
            alone, or the communicator is the only argument.
        together: rows drawn in every run besides the single parts. Each combines parts that have
            hidden a fault together.
    """

    name: str
    factors: Mapping[str, Parts]
    prepare: Callable[[Any, Values], AbstractContextManager[Call]]
    ranks: Callable[[Values], int]
    covers: tuple[str, ...] = ()
    outside: Mapping[str, str] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    own_results: tuple[str, ...] = ("one dim more",)
    alone: bool = False
    together: tuple[Row, ...] = ()

    @property
    def base(self) -> Row:
        """Return the base row: the first part of every factor."""
        return {factor: next(iter(parts)) for factor, parts in self.factors.items()}

    def singles(self) -> set[tuple[str, str]]:
        """Return every part of every factor, as (factor, part)."""
        return {(factor, part) for factor, parts in self.factors.items() for part in parts}

    def pairs(self) -> set[Pair]:
        """Return every pair of parts of two different factors."""
        named = [
            [(factor, part) for part in parts] for factor, parts in sorted(self.factors.items())
        ]
        return {pair for one, two in combinations(named, 2) for pair in product(one, two)}

    def draw(self, row: Row, seed: int) -> Values:
        """Draw the values that a row stands for; the draw of a factor knows those before it."""
        chance = random.Random(f"{seed} {sorted(row.items())}")
        values: Values = {"seed": chance.randrange(2**16)}
        for factor, parts in self.factors.items():
            values[factor] = parts[row[factor]](chance, values)
        return values

    def each_part(self, seed: int) -> Iterator[Row]:
        """Yield as few rows as have every part; slow and repeating parts have rows of their own."""
        chance, alone = random.Random(seed), SLOW | REPEATING
        quick = self._without(alone)
        orders = {factor: chance.sample(parts, len(parts)) for factor, parts in quick.items()}
        for place in range(max(map(len, orders.values()))):
            yield {factor: order[place % len(order)] for factor, order in orders.items()}
        for factor, part in sorted(self.singles() & alone):
            yield self.base | {factor: part}

    def with_parts(self, parts: Collection[tuple[str, str]]) -> Iterator[Row]:
        """Yield as few rows as have these parts; all other factors have their first part."""
        left = {factor: [its for of, its in parts if of == factor] for factor, _ in parts}
        while left := {factor: its for factor, its in left.items() if its}:
            yield self.base | {factor: its.pop() for factor, its in left.items()}

    def each_pair(self, seed: int) -> Iterator[Row]:
        """Yield a covering array: rows with every pair of parts, or every part of a lone factor."""
        from covertable import make

        quick, slow = self._without(SLOW), sorted(self.singles() & SLOW)
        yield from make(quick, strength=min(2, len(quick)), salt=str(seed))
        for (factor, part), (other, its) in product(slow, sorted(self.singles())):
            if factor != other:
                yield self.base | {factor: part, other: its}

    def _without(self, alone: set[tuple[str, str]]) -> dict[str, list[str]]:
        return {
            factor: [part for part in parts if (factor, part) not in alone]
            for factor, parts in self.factors.items()
        }


SLOW = {
    *(
        ("(call)", "10th"),
        ("(call)", "100th"),
        ("(runs)", "100"),
        ("comm.ranks", "9 to 17"),
        ("q.seq_len", "thousands"),
        ("x.seq_len", "thousands"),
    ),
    *(
        ("mesh.ring", "4 to 5"),
        ("mesh.ulysses", "4 to 5"),
        ("q.batch", "4 to 17"),
        ("q.group", "10 to 17"),
        ("k.heads", "10 to 33"),
    ),
}
"""Slow parts, which are drawn in rows of their own."""
REPEATING = {("chunk", "1"), ("chunk", "2 to 5"), ("micro_batches", "50"), ("pass_tokens", "8")}
"""Parts that repeat collectives, which takes long beside large parts.

Single parts draw them in rows of their own; pairs combine them with all other parts.
"""


LEFT_OUT = ...
"""The drawn value of a parameter that is not passed."""


def pure(
    name: str, factors: Mapping[str, Parts], make: Callable[[Values], Call], **more: Any
) -> Subject:
    """Return the subject of a function that takes no communicator."""
    return Subject(name, factors, lambda _, drawn: nullcontext(make(drawn)), lambda _: 1, **more)


def judged(
    name: str,
    function: Callable[..., Any],
    factors: Mapping[str, Parts],
    judge: Callable[[Values, Any], None],
    *names: str,
    **more: Any,
) -> Subject:
    """Return the subject of a function whose parameters are drawn as they are.

    Args:
        name, factors: as in `Subject`.
        function: the function that is called.
        judge: takes the drawn values and the result, and compares it with a definition.
        names: the parameters that are passed; all factors if no name is given.
        more: as in `Subject`.
    """

    def make(drawn: Values) -> Call:
        given = {x: drawn[x] for x in names or factors if drawn[x] is not LEFT_OUT}
        return Call(function, given, partial(judge, drawn))

    return pure(name, factors, make, **more)


def values(*items: Any) -> Parts:
    """Return a part for each value, named as the value prints."""
    return {str(item): (lambda _, __, item=item: item) for item in items}  # type: ignore[misc]


def spans(*bounds: tuple[int, int]) -> Parts:
    """Return parts that are ranges of whole numbers, bounds included."""
    return {
        str(low) if low == high else f"{low} to {high}": (
            lambda chance, _, b=(low, high): chance.randint(*b)  # type: ignore[misc]
        )
        for low, high in bounds
    }


def normal(seed: int, shape: Sequence[int], dtype: str) -> Tensor:
    """Return normally distributed random numbers."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return drawn.to(getattr(torch, dtype))


def whole(
    seed: int, shape: Sequence[int], dtype: str = "int64", low: int = 0, high: int = 3
) -> Tensor:
    """Return small whole numbers, which every dtype adds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, tuple(shape), generator=generator).to(getattr(torch, dtype))


def leaf(x: Tensor, memory: str, *, learns: bool = True) -> Tensor:
    """Return a leaf on the tests' device, in a layout of `MEMORIES`; it needs a gradient or not."""
    return in_memory(x.to(device()), memory).detach().requires_grad_(learns)


def same(found: Any, wanted: Any) -> None:
    """Compare two results bit for bit. Tensors may be on different devices."""
    first = wanted[0] if isinstance(wanted, tuple) and wanted else wanted
    if isinstance(first, Tensor):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, check_device=False)
    else:
        assert found == wanted


def near(name: str, found: Tensor, wanted: Tensor, allowed: Tensor, what: str = "") -> None:
    """Compare a result with the reference, and record under its name how far it is off."""
    record_ratio(name, check_close(what or name, found.detach().cpu(), wanted, allowed))
