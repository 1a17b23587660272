"""Declare the domain of plans for unequal sequences, compared with list scheduling by hand."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, product
from random import Random
from typing import Any

from domains.declared import LEFT_OUT, Call, Parts, Subject, Values, judged, pure, spans, values
from sp_core import scheduling
from sp_core.scheduling import Assignment, Work


def subject(
    name: str,
    factors: dict[str, Parts],
    judge: Callable[[Values, Any], None],
    *names: str,
    **more: Any,
) -> Subject:
    """Return the subject of a function of `sp_core.scheduling`."""
    return judged(f"scheduling.{name}", getattr(scheduling, name), factors, judge, *names, **more)


def several(chance: Random, _: Values, *, count: tuple[int, int], longest: int) -> list[int]:
    """Return random lengths of sequences, empty ones included."""
    return [chance.randint(0, longest) for _ in range(chance.randint(*count))]


LENGTHS: Parts = {
    "few": partial(several, count=(3, 6), longest=50),
    "none": lambda c, v: [],
    "one": lambda c, v: [c.randint(1, 99)],
    "many": partial(several, count=(50, 200), longest=5000),
    "equal": lambda c, v: [7] * c.randint(4, 12),
    "one of few long": lambda c, v: [64, *[1] * c.randint(1, 4)],
    "one long": lambda c, v: [10**5, *[c.randint(1, 9) for _ in range(20)]],
    "several long": lambda c, v: [
        *(c.randint(500, 999) for _ in range(c.randint(3, 7))),
        *(c.randint(1, 50) for _ in range(60)),
    ],
    "all empty": lambda c, v: [0] * c.randint(2, 5),
}
SIZES = spans((2, 4), (1, 1), (5, 8), (100, 130))
PER_TOKEN, PER_PAIR = spans((1, 9), (0, 0), (10**9, 10**12)), spans((1, 9), (0, 0), (10**6, 10**8))
WORKS: Parts = {
    "both": lambda c, v: Work(c.randint(1, 100), c.randint(1, 10)),
    "tokens only": lambda c, v: Work(c.randint(1, 100), 0),
    "pairs only": lambda c, v: Work(0, c.randint(1, 10)),
    "of a large model": lambda c, v: Work(10**12, 10**7),
}


def judge_work(given: Values, work: Work) -> None:
    """Compare costs of sequences with sums over their tokens.

    Of the 2 size chunks of a shared sequence, rank r has the chunks r and 2 size - 1 - r.
    """
    cost = [
        given["per_token"] + given["per_pair"] * (t + 1)
        for t in range(max(given["length"], given["stop"]))
    ]
    length, size = given["length"], given["size"]
    assert work.of(length) == sum(cost[:length])
    assert work.between(given["start"], given["stop"]) == sum(cost[given["start"] : given["stop"]])
    each, more = divmod(length, 2 * size)
    ends = [chunk * each + min(chunk, more) for chunk in range(2 * size + 1)]
    chunks = [sum(cost[a:b]) for a, b in pairwise(ends)]
    assert list(work.shares(length, size)) == [
        chunks[rank] + chunks[-1 - rank] for rank in range(size)
    ]


def placed(chance: Random, drawn: Values, *, kinds: Sequence[int]) -> list[list[int]]:
    """Deal sequences to lists at random: shared by all ranks, waiting, of rank 0, of rank 1, ..."""
    found: list[list[int]] = [[] for _ in range(2 + drawn["packed.size"])]
    allowed = [kind for kind in range(len(found)) if min(kind, 2) in kinds]
    for number in chance.sample(range(len(drawn["lengths"])), len(drawn["lengths"])):
        found[chance.choice(allowed)].append(number)
    return found


def plan(drawn: Values) -> Call:
    """Return the call of `Assignment` with sequences that are dealt at random."""
    shared, waiting, *packed = map(tuple, drawn["packed"])
    given = {
        "lengths": tuple(drawn["lengths"]),
        "sharded": shared,
        "packed": tuple(packed),
        "waiting": waiting,
        "padded_to": drawn["padded_to"],
    }
    return Call(Assignment, given, partial(judge_assignment, given, drawn["work"]))


def judge_assignment(given: Values, work: Work, made: Assignment) -> None:
    """Compare loads with sums over each rank's sequences; waiting ones go to the least load."""
    filled = [
        length if given["padded_to"] is None else given["padded_to"] for length in given["lengths"]
    ]
    assert [made.tokens(number) for number in range(len(filled))] == filled
    assert made.size == len(given["packed"])
    assert made.useful(work) == sum(map(work.of, given["lengths"]))
    loads = shared_loads([filled[number] for number in given["sharded"]], made.size, work)
    for rank, numbers in enumerate(given["packed"]):
        loads[rank] += sum(work.of(filled[number]) for number in numbers)
    for number in given["waiting"]:
        loads[loads.index(min(loads))] += work.of(filled[number])
    assert list(made.loads(work)) == loads


def shared_loads(lengths: Iterable[int], size: int, work: Work) -> list[int]:
    """Return each rank's work for sequences that all ranks share."""
    return [
        sum(shares)
        for shares in zip(
            [0] * size, *(work.shares(length, size) for length in lengths), strict=True
        )
    ]


POLICY: dict[str, Parts] = {"lengths": LENGTHS, "size": SIZES, "work": WORKS}
TOLERANCE: dict[str, Parts] = {
    "tolerance": {"default": lambda c, v: LEFT_OUT, **values(1e-9, 0.2, 10.0, float("inf"))}
}

SHARING = tuple(
    dict(zip(("lengths", "size", "work", "tolerance"), row, strict=True))
    for row in product(LENGTHS, ("2 to 4", "5 to 8"), WORKS, ("default", "0.2"))
)
"""Rows of the four factors on which the number of shared sequences depends."""


def longest_first(given: Values) -> list[int]:
    """Return the numbers of the sequences, the longest first."""
    return sorted(
        range(len(given["lengths"])), key=lambda number: (-given["lengths"][number], number)
    )


def dealt(given: Values, count: int) -> tuple[list[list[int]], list[int]]:
    """Give each sequence to the rank with the least work so far; all ranks share the longest.

    Returns:
        For each rank the numbers of its own sequences, and each rank's work. The `count` longest
        sequences are split among all ranks.
    """
    lengths, work, order = given["lengths"], given["work"], longest_first(given)
    loads = shared_loads((lengths[number] for number in order[:count]), given["size"], work)
    packed: list[list[int]] = [[] for _ in loads]
    for number in order[count:]:
        rank = loads.index(min(loads))
        packed[rank].append(number)
        loads[rank] += work.of(lengths[number])
    return packed, loads


def judge_balanced(given: Values, made: Assignment) -> None:
    """Compare a plan with list scheduling by hand, and its greatest load with the bound."""
    count, size = len(made.sharded), given["size"]
    packed, loads = dealt(given, count)
    assert (list(made.sharded), list(map(list, made.packed))) == (
        longest_first(given)[:count],
        packed,
    )
    assert (made.lengths, made.waiting, made.padded_to) == (tuple(given["lengths"]), (), None)
    total, tolerance = sum(loads), 0.02 if given["tolerance"] is LEFT_OUT else given["tolerance"]
    allowed = (1 + tolerance) * total / size if total else 0
    assert max(loads) <= max(allowed, *dealt(given, len(made.lengths))[1]) * (1 + 1e-12)
    if not total or max(dealt(given, 0)[1]) * size / total <= 1 + tolerance:
        assert count == 0
    if count and max(loads) <= allowed * (1 - 1e-12):  # one shared sequence fewer is not enough
        before = dealt(given, count - 1)[1]
        assert max(before) >= (1 + tolerance) * sum(before) / size * (1 - 1e-12)


def judge_dynamic(given: Values, made: Assignment) -> None:
    """Check that the sequences which the balanced plan does not share wait, the longest first."""
    extra = {} if given["tolerance"] is LEFT_OUT else {"tolerance": given["tolerance"]}
    shared = scheduling.balanced(given["lengths"], given["size"], given["work"], **extra).sharded
    waiting = tuple(number for number in longest_first(given) if number not in shared)
    assert made == Assignment(tuple(given["lengths"]), shared, ((),) * given["size"], waiting)


def judge_contiguous(given: Values, made: Assignment) -> None:
    """Check that sequences go to ranks in order, at most one more to each of the first ranks."""
    count, size = len(given["lengths"]), given["size"]
    ends = [rank * (count // size) + min(rank, count % size) for rank in range(size + 1)]
    packed = tuple(tuple(range(a, b)) for a, b in pairwise(ends))
    assert made == Assignment(tuple(given["lengths"]), (), packed)


def judge_round_robin(given: Values, made: Assignment, *, padded: bool = False) -> None:
    """Check that sequence i is on rank i mod size, and if `padded` as long as the longest one."""
    packed = tuple(
        tuple(n for n in range(len(given["lengths"])) if n % given["size"] == rank)
        for rank in range(given["size"])
    )
    assert made == Assignment(
        tuple(given["lengths"]),
        (),
        packed,
        padded_to=max(given["lengths"], default=0) if padded else None,
    )


SUBJECTS = [
    subject(
        "Work",
        {
            "per_token": PER_TOKEN,
            "per_pair": PER_PAIR,
            "length": spans((5, 60), (0, 0), (1, 1), (2000, 3000)),
            "start": spans((3, 9), (0, 0), (1000, 1500)),
            "stop": {**spans((2000, 2500)), "start": lambda c, v: v["start"]},
            "size": SIZES,
        },
        judge_work,
        *("per_token", "per_pair"),
        covers=tuple(f"scheduling.Work.{name}" for name in ("of", "between", "shares")),
    ),
    pure(
        "scheduling.Assignment",
        {
            "lengths": LENGTHS,
            "packed.size": SIZES,
            "packed": {
                "mixed": partial(placed, kinds=(0, 1, 2)),
                "all shared": partial(placed, kinds=(0,)),
                "all waiting": partial(placed, kinds=(1,)),
                "all packed": partial(placed, kinds=(2,)),
            },
            "padded_to": {
                "none": lambda c, v: None,
                "the longest": lambda c, v: max(v["lengths"], default=0),
                "more": lambda c, v: max(v["lengths"], default=0) + c.randint(1, 50),
            },
            "work": WORKS,
        },
        plan,
        covers=tuple(f"scheduling.Assignment.{name}" for name in ("tokens", "loads", "useful")),
        outside={"sharded": "by packed", "waiting": "by packed", "number": "all are tried"},
    ),
    subject("balanced", POLICY | TOLERANCE, judge_balanced, together=SHARING),
    subject("dynamic", POLICY | TOLERANCE, judge_dynamic),
    subject("contiguous", POLICY, judge_contiguous),
    subject("round_robin", POLICY, judge_round_robin),
    subject("padded", POLICY, partial(judge_round_robin, padded=True)),
]
