"""Compare our attention schemes with torch's ring, DeepSpeed's Ulysses and one process.

Attention is causal. With --device cuda each rank has a GPU, and torch's ring uses NCCL.

On a CPU a sliding window and packed documents are compared too. torch computes them in one process
of two threads. FlexAttention, compiled, has no backward there, so its lines are of forward alone.
Nested tensors take no causal mask there, so documents are not causal.

All contestants share the processes of a launch and take turns in random order; forward and backward
are timed. Each is checked against one process before it is timed, and one that is wrong has no
time. Exit code: 0 if every contestant that is installed was right, whatever the ratios; 1 if one
was wrong or a launch failed; 2 for options that cannot be run.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks.contests.contest import Contest, Entry, Part, Wrong, at_least, requirements, some_of
from benchmarks.launching import Options, Record, UsageError, about, numbers_of_ranks
from benchmarks.reporting.tables import make
from benchmarks.statistics import Interval, Requirement, exact_interval

RANKS, DTYPE = 2, "float32"
LAYOUTS = {
    "allgather_kv": ("contiguous", "zigzag"),
    "ring": ("contiguous", "zigzag"),
    "ulysses": ("contiguous",),
}
OURS = [f"{scheme}/{layout}/off" for scheme, layouts in LAYOUTS.items() for layout in layouts]
BALANCED = {"allgather_kv": "zigzag", "ring": "zigzag", "ulysses": "contiguous"}
HEADS = 8
PLACE = 4096  # tokens; unmasked attention and single ranks are measured up to this length
LAUNCHES = 12  # a verdict needs at least as many
HOW_OFTEN: Options = {
    "--launches": about(
        type=at_least(1),
        default=LAUNCHES,
        metavar="N",
        help="how often processes start (%(default)s)",
    )
}
PEERS = ("torch ring/all-gather", "torch ring/all-to-all", "deepspeed ulysses")
SOLO, DUO = "sdpa/1 thread", "sdpa/2 threads"
MASKED = {
    "window/forward": ("flex/2 threads", "window", False),
    "documents/forward": ("flex/2 threads", "documents", False),
    "documents": ("nested/2 threads", "documents", True),
}
"""By the end of our names: torch's contestant, its mask, and whether that has a CPU backward."""

STATES = ("ok", "not installed", "failed", "wrong")
"""The statuses of a contestant, the worst last."""

LEGEND = (
    "One launch gives one number per contestant, the median of its samples; a ratio is the median "
    "over the launches, in brackets its exact interval (order statistics; 95 %, or the widest with "
    "fewer than 6 launches). open: the interval crosses the bound. Times: forward and backward, or "
    "forward alone where the name says so, last rank's end minus first rank's start."
)


def heat_name(seq: int, dtype: str) -> str:
    """Return the name of a heat, the times at one length and dtype; float32 is left out."""
    return str(seq) if dtype == DTYPE else f"{seq} {dtype}"


def tokens(heat: str) -> int:
    """Return the length in the name of a heat."""
    return int(heat.split(maxsplit=1)[0])


def plan(options: argparse.Namespace) -> tuple[Record, list[Entry]]:
    """Return the setting of all launches, and a launch for each seed and number of ranks.

    On GPUs a number of ranks is left out if it is greater than the number of GPUs. "left_out" in
    the setting says so.

    Raises:
        UsageError: the peers cannot split a length or the heads, or there are too few GPUs for
            every number of ranks.
    """
    from sp_core.transport import count_devices

    seqs = numbers_of_ranks(options.seq, option="--seq")
    counts = numbers_of_ranks(options.ranks, divide=options.heads)
    refuse(options, seqs, counts)
    gpus = max(counts) if options.device == "cpu" else count_devices(options.device)
    found = [size for size in counts if size <= gpus]
    left_out = [f"P = {n} needs a GPU for each rank; there are {gpus}." for n in counts if n > gpus]
    if not found:
        raise UsageError(" ".join(left_out) + " Pass fewer --ranks.")
    setting = {
        "seqs": seqs,
        "dtypes": options.dtype,
        "heads": options.heads,
        "device": options.device,
        "samples": options.samples,
    }
    return {**setting, "left_out": left_out}, [
        Entry(f"P = {n}, seed {seed}", n, {**setting, "seed": seed})
        for seed in range(options.launches)
        for n in found
    ]


def by_seeds(
    name: str,
    text: str | None,
    measure: str,
    show: Callable[[Record], Iterable[Part]],
    *,
    seq: int,
    multiple: int,
    timeout: float,
) -> Contest:
    """Return a contest of two ranks at one length, whose launches differ by their seeds.

    Args:
        name, text, measure, show, timeout: as in `Contest`.
        seq: the default number of tokens.
        multiple: the number of tokens must be a multiple of twice this.
    """

    def plan(options: argparse.Namespace) -> tuple[Record, list[Entry]]:
        refuse(options, [options.seq], [multiple])
        known = {"seq": options.seq}
        return known, [
            Entry(f"seed {seed}", RANKS, {**known, "seed": seed})
            for seed in range(options.launches)
        ]

    tokens = about(type=at_least(1), default=seq, metavar="S", help="tokens (default: %(default)s)")
    options = {**HOW_OFTEN, "--seq": tokens}
    return Contest(name, text, options, plan, measure, show, f"{name}.json", timeout)


def refuse(options: argparse.Namespace, seqs: Iterable[int], counts: Sequence[int]) -> None:
    """Raise UsageError if a number of ranks cannot split a length."""
    if any(seq % (2 * size) for seq in seqs for size in counts):
        text = f"--seq {options.seq}: pass lengths that are multiples of {2 * math.lcm(*counts)}."
        raise UsageError(text)


def show(document: Record) -> Iterator[Part]:
    """Yield a table for each length, its quickest contestant first, and the requirements."""
    yield from document.get("left_out", ())
    everything = document["launches"]
    for ranks in sorted({launch.get("ranks", RANKS) for launch in everything}):
        launches = [launch for launch in everything if launch.get("ranks", RANKS) == ranks]
        everywhere = launches[0]["seqs"]
        for dtype in dict.fromkeys(heat.partition(" ")[2] for heat in everywhere):
            heats = [heat for heat in everywhere if heat.partition(" ")[2] == dtype]
            for heat in heats:
                yield from standings(launches, heat, best(launches, heat))
            title = f"required, P = {ranks} {dtype}".rstrip()
            yield requirements(title, lines(launches, heats), LEGEND)


def standings(launches: Sequence[Record], seq: object, winner: str | None) -> Iterator[Part]:
    """Yield the table of one length, its quickest contestant first, and the wrong contestants."""
    heats = [launch["seqs"][str(seq)] for launch in launches]
    times = {name: typical(launches, seq, name) for name in heats[0]}
    ranks = f"P = {launches[0].get('ranks', RANKS)}"
    rows = []
    for name in sorted(times, key=lambda name: times[name] or float("inf")):
        state, worst = judged([heat[name] for heat in heats])
        ms = "-" if times[name] is None else f"{(times[name] or 0) * 1e3:.2f}"
        rows.append((name, ms, str(ratio(launches, seq, name, winner) or "-"), worst, state))
        if not state.startswith(("ok", "not installed")):
            yield Wrong(f"{name}, sequence {seq}, {ranks}: {state}")
    columns = ("contestant", "ms", f"time / {winner or 'ours'}", "max error", "status")
    yield make(f"sequence {seq}, {ranks}, {len(launches)} launches", columns, rows)


def judged(found: Sequence[Record]) -> tuple[str, str]:
    """Return a contestant's worst status of all launches, and its largest error, as texts."""
    errors = [error for check in found for error in check.get("errors", {}).values()]
    worst = "-" if not errors else "not finite" if None in errors else f"{max(errors):.1e}"
    chosen = max(found, key=lambda check: STATES.index(check["status"]))
    if (status := chosen["status"]) == "ok":
        return status, worst
    count = sum(check["status"] == status for check in found)
    often = "" if count == len(found) else f" in {count} of {len(found)} launches"
    reason = f": {chosen['reason']}" if "reason" in chosen else ""
    return f"{status}{often}{reason}", worst


def medians(launches: Sequence[Record], seq: object, name: str | None) -> list[float | None]:
    """Return the seconds of a contestant in each launch; None where it was not timed."""
    found = (launch["seqs"].get(str(seq), {}).get(name, {}) for launch in launches)
    return [heat.get("median_s") for heat in found]


def typical(launches: Sequence[Record], seq: object, name: str) -> float | None:
    """Return a contestant's median seconds over the launches that timed it; None without any."""
    times = [x for x in medians(launches, seq, name) if x is not None]
    return statistics.median(times) if times else None


def ratio(
    launches: Sequence[Record], seq: object, above: str | None, below: str | None
) -> Interval | None:
    """Return the interval of `above` / `below` over the launches that timed both, or None."""
    pairs = zip(medians(launches, seq, above), medians(launches, seq, below), strict=True)
    values = [a / b for a, b in pairs if a is not None and b is not None]
    return exact_interval(values) if values else None


def best(launches: Sequence[Record], seq: object, names: Iterable[str] = OURS) -> str | None:
    """Return the contestant with the least median over all launches; None if none was timed."""
    found = {name: time for name in names if (time := typical(launches, seq, name)) is not None}
    return min(found, key=lambda name: found[name], default=None)


def lines(launches: Sequence[Record], seqs: Sequence[str]) -> list[Requirement]:
    """Return the requirements of contestants that take part, at lengths of one dtype.

    Requirements for no particular length are judged at 4096 tokens, or else at the longest.
    """
    place = max(seqs, key=lambda seq: (tokens(seq) == PLACE, tokens(seq)))
    winner = best(launches, place)
    required: list[tuple[str, str, str, float, str | None, str | None]] = [
        (f"{name} / two threads", place, "<=", 1.05, name, DUO)
        for name in (winner, winner and winner.replace("/off", "/agree"))
    ]
    for seq in seqs:
        pairs = {peer: best(launches, seq) for peer in PEERS}
        for form, (peer, *_) in MASKED.items():
            pairs[f"{peer}/{form}"] = best(launches, seq, [f"{name}/{form}" for name in OURS])
        required += [
            (f"{peer} / {ours}", seq, ">", 1.0, peer, ours) for peer, ours in pairs.items()
        ]
    rings = ("ring/contiguous/off", "ring/zigzag/off")
    required.append(("ring, contiguous / zigzag", place, ">=", 1.3, *rings))
    for scheme, layout in BALANCED.items():
        name, one = f"{scheme}/{layout}/off", f"{scheme}/one rank"
        required += [
            (f"{scheme}, causal / full mask", place, "<=", 0.6, name, f"{name}/full"),
            (f"{scheme}, one rank / one thread", place, "<=", 1.03, one, SOLO),
        ]
    measured = launches[0]["seqs"]
    return [
        Requirement(
            f"{text}, {tokens(seq)} tokens",
            relation,
            bound,
            ratio(launches, seq, above, below),
            LAUNCHES,
        )
        for text, seq, relation, bound, above, below in required
        if {above, below} <= {*measured[seq]}
    ]


peers = Contest(
    "peers",
    __doc__,
    {
        **HOW_OFTEN,
        "--seq": about(
            default="1024,4096,8192", metavar="S,S,...", help="lengths (default: %(default)s)"
        ),
        "--ranks": about(
            default=str(RANKS), metavar="P,P,...", help="numbers of ranks (default: %(default)s)"
        ),
        "--device": about(default="cpu", metavar="KIND", help="cpu, or cuda (default: cpu)"),
        "--dtype": about(
            type=some_of(DTYPE, "bfloat16", "float16", "float64"),
            default=DTYPE,
            metavar="DTYPE,...",
            help="such as float32,bfloat16 (%(default)s)",
        ),
        "--samples": about(
            type=at_least(0),
            default=0,
            metavar="N",
            help="of a contestant (default: fewer for long ones)",
        ),
        "--heads": about(
            type=at_least(1), default=HEADS, help="of 64 elements (default: %(default)s)"
        ),
    },
    plan,
    f"{__package__}.contestants:measure",
    show,
    "peers.json",
    timeout=1800.0,
)
