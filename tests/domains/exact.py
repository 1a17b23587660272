"""Declare the domain of `Sharding`: constructors and methods, compared with their definitions."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch
from oracle.collective_cases import MEMORIES, in_memory
from torch import Tensor

import sp_core as sp
from domains.collectives import DTYPES
from domains.declared import Call, Parts, Values, pure, same, spans, values, whole

# Sharding

SPANS: dict[str, Parts] = {
    "seq_len": spans((10, 40), (0, 0), (1, 9), (1000, 3000)),
    "size": spans((2, 9), (1, 1), (10, 64)),
    "start": spans((0, 0), (1, 9), (100_000, 1_000_000), (2**61, 2**61 + 99)),
}


def owned(layout: str, seq_len: int, size: int, start: int) -> list[list[int]]:
    """Return the positions of each rank, from the definition of a layout."""
    tokens = torch.arange(start, start + seq_len)
    if layout == "striped":
        return [tokens[rank::size].tolist() for rank in range(size)]
    if layout == "contiguous":
        return [chunk.tolist() for chunk in tokens.tensor_split(size)]
    chunks = [chunk.tolist() for chunk in tokens.tensor_split(2 * size)]
    return [chunks[rank] + chunks[-1 - rank] for rank in range(size)]


def dealt(drawn: Values, *, ordered: bool = False) -> list[list[int]]:
    """Deal positions with gaps between them to ranks at random, and return those of each rank."""
    chance, length, size = Random(drawn["seed"]), drawn["seq_len"], drawn["size"]
    tokens = chance.sample(range(drawn["start"], drawn["start"] + 2 * length), length)
    hands: list[list[int]] = [[] for _ in range(size)]
    for token in tokens:
        hands[chance.randrange(size)].append(token)
    return [sorted(hand) for hand in hands] if ordered else hands


def runs_of(drawn: Values) -> tuple[tuple[range, ...], ...]:
    """Return two segments for each rank: ranges with the same step, some of them empty."""
    chance, size, step = Random(drawn["seed"]), drawn["size"], 1 + drawn["seed"] % 3
    inner = sorted(chance.randint(0, drawn["seq_len"]) for _ in range(2 * size - 1))
    ends = [drawn["start"] + step * end for end in (0, *inner, drawn["seq_len"])]
    pieces = [range(begin, end, step) for begin, end in pairwise(ends)]
    chance.shuffle(pieces)
    return tuple(tuple(pieces[2 * rank : 2 * rank + 2]) for rank in range(size))


def made(function: Callable[..., sp.Sharding], given: Values, wanted: list[list[int]]) -> Call:
    """Return the call of a constructor, whose sharding must give each rank the wanted positions."""

    def judge(made: sp.Sharding) -> None:
        again = function(**given)
        assert [made.positions(rank).tolist() for rank in range(len(wanted))] == wanted
        assert (made.size, made.seq_len) == (len(wanted), sum(map(len, wanted)))
        assert made.lengths == tuple(map(len, wanted))
        assert made.end == max((p + 1 for owned in wanted for p in owned), default=0)
        assert made == again
        assert (hash(made), made.fingerprint) == (hash(again), again.fingerprint)

    return Call(function, given, judge)


def by_layout(layout: str, drawn: Values) -> Call:
    """Return the call of a layout's constructor."""
    given = {name: drawn[name] for name in SPANS}
    return made(getattr(sp.Sharding, layout), given, owned(layout, **given))


def from_positions(drawn: Values) -> Call:
    """Return the call of `from_positions` with lists or tuples."""
    positions = dealt(drawn, ordered=drawn["positions"] == "ascending")
    given = tuple(map(tuple, positions)) if drawn["positions"] == "tuples" else positions
    return made(sp.Sharding.from_positions, {"positions": given}, positions)


def from_segments(drawn: Values) -> Call:
    """Return the call of `Sharding` itself."""
    segments = runs_of(drawn)
    wanted = [[p for piece in pieces for p in piece] for pieces in segments]
    return made(sp.Sharding, {"segments": segments}, wanted)


def masks(drawn: Values) -> dict[str, sp.Mask]:
    """Return masks by name, for the tokens of a sharding."""
    end = drawn["start"] + drawn["seq_len"]
    cuts = sorted(Random(drawn["seed"]).randint(drawn["start"], end) for _ in range(5))
    return {
        "causal": sp.Mask(causal=True),
        "full": sp.Mask(),
        "window": sp.Mask(causal=drawn["seed"] % 2 > 0, window=7),
        "documents": sp.Mask(causal=True, documents=(0, *cuts, end)),
        "other keys": sp.Mask(documents=(0, *cuts, end), kv_documents=(0, *range(4, 24, 4), 30)),
    }


def balanced(drawn: Values) -> Call:
    """Return the call of `Sharding.balanced`."""
    mask = masks(drawn)[drawn["mask"]]
    given = {name: drawn[name] for name in (*SPANS, "chunk")} | {"mask": mask}

    def judge(found: sp.Sharding) -> None:
        owned = [found.positions(rank).tolist() for rank in range(drawn["size"])]
        tokens = range(drawn["start"], drawn["start"] + drawn["seq_len"])
        made(sp.Sharding.balanced, given, owned).judge(found)
        assert sorted(position for positions in owned for position in positions) == [*tokens]
        keys = range(mask.kv_documents[-1]) if mask.kv_documents else tokens
        work = mask.allowed(tokens, keys).sum(1)
        length = drawn["chunk"] or max(32, -(-len(tokens) // (2 * drawn["size"])))
        heaviest = max((int(chunk.sum()) for chunk in work.split(length)), default=0)
        loads = [
            int(work[torch.tensor(own, dtype=torch.int64) - tokens.start].sum()) for own in owned
        ]
        assert max(loads) - min(loads) <= heaviest
        assert max(found.lengths) - min(found.lengths) <= length
        first = drawn | {"start": 0}
        # the same documents
        at_0 = sp.Sharding.balanced(**given | {"start": 0, "mask": masks(first)[drawn["mask"]]})
        assert owned == [(at_0.positions(r) + tokens.start).tolist() for r in range(at_0.size)]

    return Call(sp.Sharding.balanced, given, judge)


MADE: dict[str, Callable[[Values], sp.Sharding]] = {
    **{
        layout: lambda v, layout=layout: getattr(sp.Sharding, layout)(  # type: ignore[misc]
            v["seq_len"], v["size"], v["start"]
        )
        for layout in ("zigzag", "contiguous", "striped")
    },
    "dealt": lambda v: sp.Sharding.from_positions(dealt(v)),
    "segments": lambda v: sp.Sharding(runs_of(v)),
    "balanced": lambda v: sp.Sharding.balanced(
        v["seq_len"], v["size"], masks(v)["causal"], chunk=5, start=v["start"]
    ),
    "grouped": lambda v: sp.Sharding.zigzag(v["seq_len"], v["size"], v["start"]).group(groups(v)),
}
"""Functions that make the shardings on which methods are called."""


def groups(drawn: Values) -> list[list[int]]:
    """Return groups of ranks, in any order and of any number; one may be empty."""
    chance, size = Random(drawn["seed"] + 1), drawn["size"]
    ranks = chance.sample(range(size), size)
    cuts = sorted(chance.randint(0, size) for _ in range(chance.randint(0, 3)))
    return [ranks[begin:end] for begin, end in zip((0, *cuts), (*cuts, size), strict=True)]


def places(order: Sequence[int]) -> Tensor:
    """Return the index that each position has once the positions are sorted."""
    return torch.tensor(order, dtype=torch.int64).argsort().argsort()


class Owned:
    """Hold a sharding, and the positions that follow from its segments.

    Attributes:
        sharding: the sharding whose methods are called.
        by_rank: the positions of each rank.
        gathered: the positions of all ranks, one rank after the other.
        in_order: indices into `gathered`, in the order of `sort_segments`.
    """

    def __init__(self, sharding: sp.Sharding) -> None:
        self.sharding = sharding
        self.by_rank = [[p for piece in pieces for p in piece] for pieces in sharding.segments]
        self.gathered = [p for positions in self.by_rank for p in positions]
        self.pieces = [piece for pieces in sharding.segments for piece in pieces]
        starts = list(accumulate(map(len, self.pieces), initial=0))
        by_start = sorted(range(len(self.pieces)), key=lambda n: self.pieces[n].start)
        self.in_order = [starts[n] + i for n in by_start for i in range(len(self.pieces[n]))]

    def sorted_ranges(self, rank: int) -> list[list[int]]:
        """Return for each segment of a rank the indices that `sort_segments` gives its tokens."""
        begin = sum(map(len, self.by_rank[:rank]))
        found = []
        for piece in self.sharding.segments[rank]:
            found.append([self.in_order.index(begin + i) for i in range(len(piece))])
            begin += len(piece)
        return found


def of_tokens(drawn: Values, length: int) -> Tensor:
    """Return a tensor with `length` tokens along the drawn dim."""
    shape = [2] * drawn["x.dims"]
    shape[drawn["dim"]] = length
    return in_memory(whole(drawn["seed"], shape, drawn["x.dtype"], high=99), drawn["x.memory"])


DEFINITIONS: dict[str, tuple[tuple[str, ...], Callable[[Owned, Values], Any]]] = {
    "local_len": (("rank",), lambda o, a: len(o.by_rank[a["rank"]])),
    "positions": (("rank",), lambda o, a: torch.tensor(o.by_rank[a["rank"]], dtype=torch.int64)),
    "sorted_ranges": (("rank",), lambda o, a: o.sorted_ranges(a["rank"])),
    "group": (
        ("groups",),
        lambda o, a: [[p for rank in group for p in o.by_rank[rank]] for group in a["groups"]],
    ),
    "sort_segments": (
        ("gathered", "dim"),
        lambda o, a: a["gathered"].index_select(
            a["dim"], torch.tensor(o.in_order, dtype=torch.int64)
        ),
    ),
    "unsort_segments": (
        ("x", "dim"),
        lambda o, a: a["x"].index_select(
            a["dim"], torch.tensor(o.in_order, dtype=torch.int64).argsort()
        ),
    ),
    "shard": (
        ("x", "rank", "dim"),
        lambda o, a: a["x"].index_select(
            a["dim"], places(o.gathered).split(list(o.sharding.lengths))[a["rank"]]
        ),
    ),
    "unshard": (
        ("shards", "dim"),
        lambda o, a: torch.cat(a["shards"], a["dim"]).index_select(
            a["dim"], places(o.gathered).argsort()
        ),
    ),
    "restore": (
        ("gathered", "dim"),
        lambda o, a: a["gathered"].index_select(a["dim"], places(o.gathered).argsort()),
    ),
}
"""For each method, its arguments and a function that returns the expected result."""


ARGUMENTS: dict[str, Callable[[Values, sp.Sharding], Any]] = {
    "dim": lambda v, about: v["dim"],
    "rank": lambda v, about: {"first": 0, "last": about.size - 1}.get(v["rank"], about.size // 2),
    "groups": lambda v, about: {
        "one": [[*range(about.size)]],
        "each alone": [[rank] for rank in range(about.size)],
        "any": groups(v | {"size": about.size}),
    }[v["groups"]],
    "x": lambda v, about: of_tokens(v, about.seq_len),
    "gathered": lambda v, about: of_tokens(v, about.seq_len),
    "shards": lambda v, about: [
        of_tokens(v | {"seed": v["seed"] + length}, length) for length in about.lengths
    ],
}
"""Functions that make each argument of the methods from the drawn values, for a sharding."""


def called(method: str, drawn: Values) -> Call:
    """Return the call of a method, which is judged by its definition."""
    names, definition = DEFINITIONS[method]
    about = Owned(MADE[drawn["(sharding)"]](drawn))
    given = {name: ARGUMENTS[name](drawn, about.sharding) for name in names}

    def judge(found: Any) -> None:
        if method == "group":
            found = [found.positions(number).tolist() for number in range(found.size)]
        elif method == "sorted_ranges":
            found = [list(places) for places in found]
        same(found, definition(about, given))

    return Call(getattr(about.sharding, method), given, judge)


def method_factors(method: str) -> dict[str, Parts]:
    """Return the domain of a method: of the sharding that it belongs to, and of its arguments."""
    names = DEFINITIONS[method][0]
    own: dict[str, Parts] = {
        "rank": values("first", "middle", "last"),
        "groups": values("one", "each alone", "any"),
        "dim": {
            "first": lambda c, v: 0,
            "last": lambda c, v: v["x.dims"] - 1,
            "from the end": lambda c, v: -c.randint(1, v["x.dims"]),
        },
    }
    tensor = next((name for name in ("x", "gathered", "shards") if name in names), "")
    held = {
        "x.dims": spans((2, 4), (1, 1)),
        "x.dtype": values("float64", *(name for name in DTYPES if name != "float64")),
        "x.memory": values(*MEMORIES),
    }
    found = SPANS | {"(sharding)": values(*MADE)} | (held if tensor else {})
    return (
        found
        | ({tensor: values("drawn")} if tensor else {})
        | {name: own[name] for name in own if name in names}
    )


SUBJECTS = [
    pure("Sharding", SPANS | {"segments": values("ranges")}, from_segments),
    pure(
        "Sharding.from_positions",
        SPANS | {"positions": values("ascending", "any order", "tuples")},
        from_positions,
    ),
    *(
        pure(f"Sharding.{layout}", SPANS, partial(by_layout, layout))
        for layout in ("contiguous", "zigzag", "striped")
    ),
    pure(
        "Sharding.balanced",
        SPANS
        | {
            "mask": values("causal", "full", "window", "documents", "other keys"),
            "chunk": {"none": lambda c, v: None} | spans((1, 3), (4, 50), (64, 4000)),
        },
        balanced,
        together=tuple(
            {"seq_len": "1000 to 3000", "start": "1 to 9", "mask": mask}
            for mask in ("documents", "other keys")
        ),
    ),
    *(
        pure(f"Sharding.{method}", method_factors(method), partial(called, method))
        for method in DEFINITIONS
    ),
]
