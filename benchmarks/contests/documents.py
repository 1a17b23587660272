"""Compare packed documents and sliding windows with the same arithmetic in plain SDPA.

The ideal of packed documents is one call of SDPA per document. The ideal of a sliding window is one
unmasked call for squares of tokens, which cover the window. In both each rank has H/P heads of all
tokens, and no message is sent. All contestants share the processes of a launch and take turns;
forward and backward are timed. Each of ours is checked against one process before it is timed. Exit
code: 0 if all were right and every bound is met, else 1; 2 for options that cannot be run.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sp_core as sp
from benchmarks.contests.contest import Contest, Entry, Part, Wrong, at_least, requirements, unmet
from benchmarks.contests.growth import documents
from benchmarks.contests.peers.contestants import alone, draw, errors, part, verdict
from benchmarks.contests.peers.table import HEADS
from benchmarks.launching import KEEP_MEMORY, Launch, Record, about, numbers_of_ranks
from benchmarks.reporting.tables import make
from benchmarks.sample import makespans, race, turn
from benchmarks.statistics import WITHIN, Requirement, certain, ratio
from benchmarks.worker import Rank
from sp_core.mask.definition import count_visible
from sp_core.schemes import SCHEMES

SEQ, COUNTS, WINDOW = 4096, (1, 8, 64, 512), 64
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
IDEAL, ALONE = "ideal", "ours, one rank"
NEAR, BANDED, HALF, SKEWED, WORK = 1.15, 1.3, 0.6, 1.05, 1.02
"""Greatest ratios: documents and a window to their ideal, a window on two ranks to one, `balanced`
to zigzag on skewed lengths, and a rank's counted work to the mean."""


def masks() -> dict[str, sp.Mask]:
    """Return the masks by name: packed documents, skewed ones, and a sliding window."""
    skewed = (0, *range(SEQ // 2, SEQ + 1, 32))
    return {
        **{f"{n} documents": documents(n, SEQ) for n in COUNTS},
        "skewed": sp.Mask(causal=True, documents=skewed),
        "window": sp.Mask(causal=True, window=WINDOW),
    }


def sharded(layout: str, size: int, mask: sp.Mask) -> Any:
    """Return the sharding of a layout; only `balanced` looks at the mask."""
    return getattr(sp.Sharding, layout)(SEQ, size, *([mask] if layout == "balanced" else []))


def ideal(whole: Sequence[Tensor], mask: sp.Mask, heads: int) -> Callable[[], object]:
    """Return a step that does only the arithmetic, with `heads` heads of all tokens."""
    some = [x[:, :, :heads].transpose(1, 2) for x in whole]
    if mask.documents is None:  # 64 queries see 127 keys; with 128 the call is faster
        squares = [x.squeeze(0).unflatten(1, (-1, WINDOW)).transpose(0, 1) for x in some]
        calls = [[torch.cat([x] * n, 2) for x, n in zip(squares, (1, 2, 2, 1), strict=True)]]
    else:
        calls = [[x[:, :, i:j].contiguous() for x in some] for i, j in pairwise(mask.documents)]
    leaves = [[x.requires_grad_() for x in call[:3]] for call in calls]
    flat, grads = [x for call in leaves for x in call], [call[3] for call in calls]
    attend: Any = partial(F.scaled_dot_product_attention, is_causal=mask.documents is not None)

    def step() -> object:
        outs = [attend(*call) for call in leaves]
        return outs, torch.autograd.grad(outs, flat, grads)

    return step


def measure(setting: Record, rank: Rank) -> Record:
    """Check and time every contestant with one mask."""
    world, mask, whole = rank.world, masks()[setting["mask"]], draw(SEQ, setting["seed"])
    checks, steps = dict[str, Record](), dict[str, Any]()
    seen = {"causal": True, "window": mask.window, "documents": mask.documents}
    want = alone(whole, seen)  # out, dq, dk and dv of all tokens in one process
    with sp.Mesh(world, check="off", sp=world.size) as ranks:
        for layout, scheme in product(LAYOUTS, SCHEMES):
            sharding = sharded(layout, world.size, mask)
            mine = part(whole, sharding.positions(world.rank), heads_first=False)
            how: Record = {"comm": ranks["sp"], "sharding": sharding, "mask": mask}
            attend: Any = partial(SCHEMES[scheme], **how)
            one, wrong = f"{scheme}/{layout}", errors(mine.run(attend), mine.positions, want)
            checks[one] = verdict(world.allgather(("", wrong)))
            steps[one] = partial(mine.run, attend)
        del want
        steps[IDEAL] = ideal(whole, mask, whole[0].shape[2] // world.size)
        runners = {one: partial(turn, world, step) for one, step in steps.items()}
        local: Any = partial(sp.local_attention, mask=mask)
        single = partial(part(whole, torch.arange(SEQ), heads_first=False).run, local)
        runners[ALONE] = partial(turn, world, single, alone=True)
        race(world, runners, 1, setting["seed"])
        spans = race(world, runners, setting["rounds"], setting["seed"])
    seconds = {one: makespans(both) for one, both in spans.items()}
    return {"checks": checks, "samples_s": seconds}


def work(layout: str, size: int, mask: sp.Mask) -> float:
    """Return the greatest work of a rank over the mean, in pairs of a query and a visible key."""
    seen = count_visible(mask, range(SEQ), range(SEQ))
    shards = sharded(layout, size, mask)
    loads = [int(seen[shards.positions(rank)].sum()) for rank in range(size)]
    return max(loads) * size / sum(loads)


def lines(name: str, samples: Record, size: int) -> Iterator[Requirement]:
    """Yield the requirements on speed and work for the mask called `name` on `size` ranks.

    `samples` has the seconds of each contestant that was right. Of each layout only the quickest
    scheme is judged.
    """
    quick = {
        layout: min(some, key=lambda one: statistics.median(samples[one]))
        for layout in LAYOUTS
        if (some := [one for one in samples if one.endswith(f"/{layout}")])
    }
    mask = masks()[name]
    bound = BANDED if mask.documents is None else NEAR
    for one in quick.values():
        text = f"{name}, {one} / {IDEAL}"
        yield Requirement(text, "<=", bound, ratio(samples[one], samples[IDEAL]))
    if mask.documents is None and size == 2 and quick:
        one = min(quick.values(), key=lambda one: statistics.median(samples[one]))
        found = ratio(samples[one], samples[ALONE])
        yield Requirement(f"{name}, {one} / {ALONE}", "<=", HALF, found)
    if name == "skewed" and size == 2 and {"balanced", "zigzag"} <= {*quick}:
        found = ratio(samples[quick["balanced"]], samples[quick["zigzag"]])
        yield Requirement(f"{name}, balanced / zigzag", "<=", SKEWED, found)
    if mask.documents is not None:
        found = certain(work("balanced", size, mask))
        yield Requirement(f"{name}, balanced, most work / mean", "<=", WORK, found)


def show(document: Record) -> Iterator[Part]:
    """Yield the times of all right contestants, requirements, and a complaint for each fault."""
    for size in sorted({launch["ranks"] for launch in document["launches"]}):
        rows, needed = [], list[Requirement]()
        for found in (one for one in document["launches"] if one["ranks"] == size):
            name = found["mask"]
            bad = {one: x for one, x in found["checks"].items() if x["status"] != "ok"}
            samples = {one: x for one, x in found["samples_s"].items() if one not in bad}
            for one, seconds in sorted(samples.items(), key=lambda x: statistics.median(x[1])):
                ms = f"{1e3 * statistics.median(seconds):.2f}"
                rows.append((name, one, ms, str(ratio(seconds, samples[IDEAL]))))
            needed += lines(name, samples, size)
            yield from (Wrong(f"{name}, {one}, P = {size}: {x}") for one, x in bad.items())
        yield make(f"P = {size}", ("mask", "contestant", "ms", f"time / {IDEAL}"), rows)
        yield requirements(f"required, P = {size}", needed, WITHIN)
        yield from unmet(needed, f"P = {size}")


def plan(options: argparse.Namespace) -> tuple[Record, list[Entry]]:
    """Return the setting of all launches, and a launch for each number of ranks and mask."""
    setting = {"rounds": options.rounds, "seed": 0}
    # without this variable the kernel clears pages in random steps of any contestant
    launch = Launch(variables=(KEEP_MEMORY,))
    return setting, [
        Entry(f"P = {n}, {name}", n, {**setting, "mask": name}, {"mask": name}, launch)
        for n, name in product(numbers_of_ranks(options.ranks, divide=HEADS), masks())
    ]


OPTIONS = {
    "--ranks": about(
        default="1,2", metavar="P,P,...", help="numbers of ranks (default: %(default)s)"
    ),
    "--rounds": about(
        type=at_least(1), default=15, metavar="N", help="timed rounds (default: %(default)s)"
    ),
}
contest = Contest(
    *("documents", __doc__, OPTIONS, plan, "benchmarks.contests.documents:measure", show),
    file="documents_{mpi}.json",
    timeout=600.0,
)
