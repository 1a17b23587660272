"""Compare packed documents and sliding windows with the same arithmetic in plain SDPA.

The ideal of packed documents is one call of SDPA per document. The ideal of a sliding window is one
unmasked call for squares of tokens, which cover the window. In both each rank has H/P heads of all
tokens, and no message is sent. All contestants share the processes of a launch and take turns;
forward and backward are timed. Each of ours is checked against one process before it is timed. Exit
code: 0 if all were right and every bound is met, else 1; 2 for options that cannot be run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sp_core as sp
from benchmarks.contests.contest import Contest, Entry, Part, Wrong, requirements
from benchmarks.contests.growth import documents
from benchmarks.contests.peers.contestants import draw, errors, part, verdict
from benchmarks.launching import KEEP_MEMORY, Launch, Record, about, main, numbers_of_ranks
from benchmarks.reporting.tables import make
from benchmarks.sample import ABSENT, Span, makespans, meet_asleep, race
from benchmarks.statistics import Interval, Requirement, exact_interval
from benchmarks.worker import Intracomm, Rank
from sp_core.mask.blocks import count_visible
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


def sharded(layout: str, size: int, mask: sp.Mask) -> sp.Sharding:
    """Return the sharding of a layout; only `balanced` looks at the mask."""
    more = (mask,) if layout == "balanced" else ()
    made: sp.Sharding = getattr(sp.Sharding, layout)(SEQ, size, *more)
    return made


def expected(whole: Sequence[Tensor], mask: sp.Mask) -> list[Tensor]:
    """Compute out, dq, dk and dv of all tokens in one process, with a dense mask."""
    bias = torch.zeros(SEQ, SEQ)
    bias.masked_fill_(~mask.allowed(torch.arange(SEQ), torch.arange(SEQ)), -torch.inf)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)

    found = part(whole, torch.arange(SEQ), heads_first=True).run(dense)
    return [x.detach() for x in found]


def ideal(whole: Sequence[Tensor], mask: sp.Mask, heads: int) -> Callable[[], object]:
    """Return a step that does only the arithmetic, with `heads` heads of all tokens."""
    some = [x[:, :, :heads].transpose(1, 2) for x in whole]
    if mask.documents is None:  # 64 queries see 127 keys, and one more makes the call faster
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


def timed(world: Intracomm, step: Callable[[], object], *, alone: bool = False) -> Span:
    """Time a step on this rank, or `alone` on rank 0 while the others sleep."""
    if alone and world.rank:
        meet_asleep(world)
        return ABSENT
    if not alone:
        world.Barrier()
    start = time.perf_counter()
    step()
    span = start, time.perf_counter()
    if alone:
        meet_asleep(world)
    return span


def measure(setting: Record, rank: Rank) -> Record:
    """Check and time every contestant with one mask."""
    world, mask, whole = rank.world, masks()[setting["mask"]], draw(SEQ, setting["seed"])
    want, checks, steps = expected(whole, mask), dict[str, Record](), dict[str, Any]()
    with sp.Mesh(world, check="off", sp=world.size) as ranks:
        for layout, scheme in product(LAYOUTS, SCHEMES):
            sharding = sharded(layout, world.size, mask)
            mine = part(whole, sharding.positions(world.rank), heads_first=False)
            how: Record = {"comm": ranks["sp"], "sharding": sharding, "mask": mask}
            attend: Any = partial(SCHEMES[scheme], **how)
            one, wrong = f"{scheme}/{layout}", errors(mine.run(attend), mine, want)
            checks[one] = verdict(world.allgather(("", wrong)))
            steps[one] = partial(mine.run, attend)
        del want
        steps[IDEAL] = ideal(whole, mask, whole[0].shape[2] // world.size)
        runners = {one: partial(timed, world, step) for one, step in steps.items()}
        local: Any = partial(sp.local_attention, mask=mask)
        single = partial(part(whole, torch.arange(SEQ), heads_first=False).run, local)
        runners[ALONE] = partial(timed, world, single, alone=True)
        race(world, runners, 1, setting["seed"])
        spans = race(world, runners, setting["rounds"], setting["seed"])
    seconds = {one: makespans(both) for one, both in spans.items()}
    return {"mask": setting["mask"], "checks": checks, "samples_s": seconds}


def work(layout: str, size: int, mask: sp.Mask) -> float:
    """Return the most work of a rank over the mean; work is the pairs that its queries see."""
    seen = count_visible(mask, range(SEQ), range(SEQ))
    shards = sharded(layout, size, mask)
    loads = [int(seen[shards.positions(rank)].sum()) for rank in range(size)]
    return max(loads) * size / sum(loads)


def ratio(samples: Record, above: str, below: str) -> Interval:
    """Return the time of one contestant over that of another, in the same rounds."""
    pairs = zip(samples[above], samples[below], strict=True)
    return exact_interval([a / b for a, b in pairs])


def lines(name: str, samples: Record, size: int) -> Iterator[Requirement]:
    """Yield the requirements for one mask; of each layout the quickest scheme is judged."""
    quick = {
        layout: min(
            (one for one in samples if one.endswith(f"/{layout}")),
            key=lambda one: statistics.median(samples[one]),
        )
        for layout in LAYOUTS
    }
    mask = masks()[name]
    bound = BANDED if mask.documents is None else NEAR
    for one in quick.values():
        text = f"{name}, {one} / {IDEAL}"
        yield Requirement(text, "<=", bound, ratio(samples, one, IDEAL))
    if mask.documents is None and size == 2:
        one = min(quick.values(), key=lambda one: statistics.median(samples[one]))
        yield Requirement(f"{name}, {one} / {ALONE}", "<=", HALF, ratio(samples, one, ALONE))
    if name == "skewed" and size == 2:
        found = ratio(samples, quick["balanced"], quick["zigzag"])
        yield Requirement(f"{name}, balanced / zigzag", "<=", SKEWED, found)
    if mask.documents is not None:
        found = exact_interval([work("balanced", size, mask)])
        yield Requirement(f"{name}, balanced, most work / mean", "<=", WORK, found)


def show(document: Record) -> Iterator[Part]:
    """Yield the times of all contestants, the requirements, and what is wrong."""
    for size in sorted({launch["ranks"] for launch in document["launches"]}):
        rows, needed = [], list[Requirement]()
        for found in document["launches"]:
            if found["ranks"] != size:
                continue
            name, samples = found["mask"], found["samples_s"]
            for one, seconds in sorted(samples.items(), key=lambda x: statistics.median(x[1])):
                ms = f"{1e3 * statistics.median(seconds):.2f}"
                rows.append((name, one, ms, str(ratio(samples, one, IDEAL))))
            needed += lines(name, samples, size)
            for one, check in found["checks"].items():
                if check["status"] != "ok":
                    yield Wrong(f"{name}, {one}, P = {size}: {check}")
        yield make(f"P = {size}", ("mask", "contestant", "ms", f"time / {IDEAL}"), rows)
        yield requirements(f"required, P = {size}", needed)
        for line in needed:
            if line.mark.startswith("not reached"):
                yield Wrong(f"P = {size}: {line.text}: {line.cells()}")


def plan(options: argparse.Namespace) -> tuple[Record, list[Entry]]:
    """Return a launch for each number of ranks and mask."""
    setting = {"rounds": options.rounds, "seed": 0}
    # without this, the kernel clears pages at random in the steps of either contestant
    launch = Launch(timeout=options.timeout, variables=(KEEP_MEMORY,))
    measure = "benchmarks.contests.documents:measure"
    return setting, [
        Entry(f"P = {n}, {name}", n, measure, {**setting, "mask": name}, launch, {"ranks": n})
        for n, name in product(numbers_of_ranks(options.ranks), masks())
    ]


OPTIONS = {
    "--ranks": about(
        default="1,2", metavar="P,P,...", help="numbers of ranks (default: %(default)s)"
    ),
    "--rounds": about(
        type=int, default=15, metavar="N", help="timed rounds (default: %(default)s)"
    ),
}
contest = Contest("documents", __doc__, OPTIONS, plan, show, "documents_{mpi}.json", timeout=600.0)

if __name__ == "__main__":
    main(contest)
