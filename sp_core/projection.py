"""Predict how quick each scheme and mesh is for a problem.

An example:

    sp-core plan --seq 65536 --ranks 64 --heads 32 --link 9gbit,9us --flops 1e14

The problem is one layer of causal attention, forward and backward, split evenly
(zigzag). Ranks fill nodes one after the other; neighbours along the axis of
Ulysses are neighbours in a node. With own = B (S/P) D e bytes for one head of
one rank's tokens, the time of a pass is:

    ring          R attentions to blocks of keys. All but the first overlap with
                  a message of 2K own each: the longer one counts
    ulysses       all-to-alls of (2H + 2K) own (U-1)/U in all, and the attention
    hybrid        both: all-to-alls in groups of U ranks, then a ring of R ranks
                  for the heads that a rank has received
    allgather_kv  P - 1 messages of 2K own, one after the other, and the
                  attention

Letters: B batch, S sequence, H heads, K key/value heads, D head dim, P = R U
ranks: R along the ring and U along Ulysses, e bytes per element.

A node has one link to other nodes, which all its ranks share. Rings and
AllGather-KV send gradients of K and V in float32 or wider, all-to-alls send
them in the dtype of K and V. A message of n bytes takes alpha + beta n. The
bytes and messages are those of `sp_core.cost`, which counts no messages for a
collective of the MPI library. If U does not divide H and K, Ulysses sends
uneven shares, or copies of keys and values: they count.
"""

import argparse
import math
import time
import timeit
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sp_core import cost
from sp_core.attention import local_attention
from sp_core.link import Link, link_of
from sp_core.mask import Mask
from sp_core.schemes.heads import split_heads
from sp_core.sharding import Sharding
from sp_core.tuning import Tuning

BACKWARD = 2.5  # backward has 5 products of matrices, forward 2
MEASURE = "measure this machine with sp-core doctor --measure, and do not set SP_TUNING=off"
_COUNT: dict[str, Any] = {"type": int, "metavar": "N"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "--seq": {**_COUNT, "required": True, "help": "tokens"},
    "--ranks": {**_COUNT, "required": True, "help": "number of ranks"},
    "--heads": {**_COUNT, "required": True, "help": "query heads"},
    "--kv-heads": {**_COUNT, "help": "key/value heads (default: as many as heads)"},
    "--head-dim": {**_COUNT, "default": 128, "help": "default: %(default)s"},
    "--batch": {**_COUNT, "default": 1, "help": "default: %(default)s"},
    "--ranks-per-node": {**_COUNT, "default": 1, "help": "default: %(default)s"},
    "--dtype": {
        "choices": ("bfloat16", "float16", "float32"),
        "default": "bfloat16",
        "help": "default: %(default)s",
    },
    "--link": {
        "required": True,
        "metavar": "RATE,LATENCY",
        "help": "of a node, such as 25gbit,10us or 400MB,1ms (b: bits, B: bytes)",
    },
    "--node-link": {
        "metavar": "RATE,LATENCY",
        "help": "inside a node (default: what was measured on this machine)",
    },
    "--flops": {
        "type": float,
        "metavar": "X",
        "help": "operations per second of a rank (default: timed on this machine)",
    },
    "--show": {**_COUNT, "default": 10, "help": "lines (default: %(default)s)"},
}


@dataclass(frozen=True)
class Problem:
    """Describe one layer of causal attention, and the machine that computes it.

    Args:
        seq_len, batch, num_heads, num_kv_heads, head_dim: tokens of a sequence; numbers of
            sequences, query heads and key/value heads; elements of a head.
        itemsize: bytes per element.
        ranks: number of ranks that share each sequence.
        per_node: number of ranks on one node.
        node, network: the link inside a node, and the link between nodes.
        flops: operations per second that a rank's attention reaches; NaN until it is measured.

    Raises:
        ValueError: a size cannot be split evenly, or is not positive.
    """

    seq_len: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    ranks: int
    per_node: int
    node: Link
    network: Link
    flops: float

    def __post_init__(self) -> None:
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        sizes = (self.seq_len, self.ranks, self.per_node, self.batch, *heads)
        if min(sizes) < 1 or max(sizes) > 2**40:
            raise ValueError(
                "a size below 1 or above 2**40 was given; --seq, --ranks, --ranks-per-node, "
                "--heads, --kv-heads, --head-dim and --batch are at least 1 and at most 2**40."
            )
        if self.seq_len % (2 * self.ranks) or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"--seq {self.seq_len} on --ranks {self.ranks}, and --heads {self.num_heads} with "
                f"--kv-heads {self.num_kv_heads} were given; the times are computed for equal "
                "shards. Pass a length that twice the number of ranks divides, and heads that the "
                "key/value heads divide."
            )

    def attention(self, seq_len: int, ranks: int) -> cost.Attention:
        """Describe the causal attention of `seq_len` tokens, sharded zigzag over `ranks` ranks."""
        sharding = Sharding.zigzag(seq_len, ranks)
        sizes = self.batch, self.num_heads, self.num_kv_heads, self.head_dim, self.itemsize
        return cost.Attention(sharding, sharding, Mask(causal=True), *sizes)

    @property
    def compute(self) -> float:
        """Seconds of one rank's share of the forward, without communication."""
        operations = 2 * self.batch * self.seq_len**2 * self.num_heads * self.head_dim
        return operations / self.ranks / self.flops


@dataclass(frozen=True)
class Projection:
    """Hold the model's prediction for a scheme on a mesh.

    Args:
        scheme: the scheme's name.
        ring, ulysses: number of ranks along each axis.
        seconds: time of forward and backward together.
        exposed: the part of `seconds` in which a rank waits for messages.
        forward, backward: messages and bytes of the rank that sends most bytes.
    """

    scheme: str
    ring: int
    ulysses: int
    seconds: float
    exposed: float
    forward: cost.Traffic
    backward: cost.Traffic


def project(problem: Problem) -> list[Projection]:
    """Return the predictions for every scheme on every mesh that fits, in order of their time."""
    found = [
        _mesh(problem, problem.ranks // ulysses, ulysses)
        for ulysses in range(1, min(problem.ranks, problem.num_heads) + 1)
        if problem.ranks % ulysses == 0
    ]
    return sorted([*found, _allgather_kv(problem)], key=lambda projection: projection.seconds)


def _mesh(problem: Problem, ring: int, ulysses: int) -> Projection:
    """Predict a ring of `ring` groups, each of `ulysses` ranks that exchange heads.

    Either number may be 1.
    """
    inside = problem.attention(problem.seq_len // ring, ulysses)
    around = problem.attention(problem.seq_len, ring)
    heads, shares = split_heads(problem.num_heads, problem.num_kv_heads, ulysses)
    compute = problem.compute * max(map(len, heads)) * ulysses / problem.num_heads
    exchanges = [cost.ulysses(inside, place) for place in range(ulysses)]
    rings = [replace(around, num_kv_heads=len(share)) for share in shares]
    sent = [  # the last rank of the ring sends most
        [one + other for one, other in zip(exchange, cost.ring(each, ring - 1), strict=True)]
        for exchange, each in zip(exchanges, rings, strict=True)
    ]
    busiest = [
        max(traffics, key=lambda one: one.bytes_sent) for traffics in zip(*sent, strict=True)
    ]
    exchange = sum(
        _exchange(problem, [one.bytes_sent for one in traffics])
        for traffics in zip(*exchanges, strict=True)
    )
    tokens = around.sharding.local_len(0)
    step, wide_step = (
        _step(problem, ring, [each.kv_block(tokens, size) for each in rings])
        for size in (around.itemsize, around.wide)
    )
    forward = _around(compute, ring, step)
    backward = _around(BACKWARD * compute, ring, step + wide_step) + wide_step
    seconds = forward + backward + exchange
    exposed = max(seconds - (1 + BACKWARD) * compute, 0.0)
    name = "ring" if ulysses == 1 else "ulysses" if ring == 1 else "hybrid"
    return Projection(name, ring, ulysses, seconds, exposed, *busiest)


def _allgather_kv(problem: Problem) -> Projection:
    whole = problem.attention(problem.seq_len, problem.ranks)
    tokens = whole.sharding.local_len(0)
    gather, scatter = (
        (problem.ranks - 1) * _step(problem, problem.ranks, [whole.kv_block(tokens, itemsize)])
        for itemsize in (whole.itemsize, whole.wide)
    )
    exposed, traffic = 2 * gather + scatter, cost.allgather_kv(whole, 0)
    seconds = (1 + BACKWARD) * problem.compute + exposed
    return Projection("allgather_kv", problem.ranks, 1, seconds, exposed, *traffic)


def _exchange(problem: Problem, sent: Sequence[int]) -> float:
    """Return the seconds of the all-to-alls of one pass on the slowest rank.

    The rank at each place of a group sends `sent[place]` bytes, in two messages to each other rank
    of its group: one before the attention and one after it. A group is consecutive ranks, which may
    be on any nodes.
    """
    ulysses, load = len(sent), defaultdict[int, float](float)
    parts = defaultdict[tuple[int, int], list[float]](list)
    for rank in range(problem.ranks):  # by group and node, the bytes to each other rank
        each = sent[rank % ulysses] / max(ulysses - 1, 1)
        parts[rank // ulysses, rank // problem.per_node].append(each)
    for (_, node), near in parts.items():
        load[node] += sum(near) * (ulysses - len(near))
    return max(
        problem.node(max(near) * (len(near) - 1), 2 * (len(near) - 1))
        + problem.network(load[node] * (len(near) < ulysses), 2 * (ulysses - len(near)))
        for (_, node), near in parts.items()
    )


def _step(problem: Problem, ring: int, nbytes: Sequence[int]) -> float:
    """Return the seconds to pass a block on, of `nbytes[place]` bytes at each place of a group."""
    ulysses, per_node = len(nbytes), problem.per_node
    near = problem.node(max(nbytes)) if ring > 1 and per_node > ulysses else 0.0
    load = defaultdict[int, int](int)
    for rank in range(problem.ranks):
        node, other = (place // per_node for place in (rank, (rank + ulysses) % problem.ranks))
        if node != other:
            load[node] += nbytes[rank % ulysses]
    return max(near, problem.network(max(load.values())) if load else 0.0)


def _around(compute: float, ring: int, step: float) -> float:
    """Return the seconds of a pass around a ring of `ring` ranks, forward or backward.

    The attention to a block overlaps with the message of the next block.

    Args:
        compute: seconds of a rank's attention to all blocks.
        step: seconds to pass on one block; in the backward, also its gradient.
    """
    return compute / ring + (ring - 1) * max(compute / ring, step)


def add_arguments(commands: Any) -> None:
    """Add the command `plan` to `commands`, the object that `add_subparsers` returns."""
    made = commands.add_parser(
        "plan",
        help="the best scheme and mesh for a problem, by the model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, option in _OPTIONS.items():
        made.add_argument(name, **option)


def main(options: argparse.Namespace, tuning: Tuning | None) -> str:
    """Return the projection as text, with one line for each scheme and mesh.

    Args:
        options: the parsed command line of `plan`.
        tuning: constants measured on this machine, if there are any.

    Raises:
        ValueError: an option is wrong, or options do not fit together.
    """
    inside = link_of(options.node_link) if options.node_link else None
    if inside is None and options.ranks_per_node > 1:
        if tuning is None or "node" not in tuning.links:
            raise ValueError(
                "the speed inside a node is not known: pass --node-link RATE,LATENCY, such as "
                f"300gbit,2us, or {MEASURE}."
            )
        inside = Link(tuning.alpha, tuning.beta)
    network = link_of(options.link)
    if options.show < 1:
        raise ValueError(f"--show is {options.show}: pass at least 1.")
    if options.flops is not None and not 0 < options.flops < math.inf:
        raise ValueError(
            f"--flops is {options.flops}: pass the operations per second of a rank, such as 100e12."
        )
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    sizes = options.seq, options.batch, options.heads, kv_heads
    problem = Problem(
        *(*sizes, options.head_dim, getattr(torch, options.dtype).itemsize),
        *(options.ranks, options.ranks_per_node, inside or network, network),
        options.flops or math.nan,
    )
    assumed = []
    if options.flops is None:
        problem = replace(problem, flops=timed_flops(min(options.head_dim, 1024)))
        threads = torch.get_num_threads()
        assumed.append(f"the speed of attention in float32 here, with {threads} threads (--flops)")
    if tuning is not None and options.ranks_per_node > 1 and not options.node_link:
        assumed.append(f"the links inside of a node as measured on {_host(tuning)} (--node-link)")
    return "\n".join(_lines(problem, project(problem)[: options.show], assumed, tuning))


def timed_flops(head_dim: int) -> float:
    """Measure the operations per second of causal attention, with the threads that torch uses.

    The quickest of four calls counts. Only operations on visible pairs are counted.
    """
    seq_len, heads = 1024, 4
    x = torch.randn(1, seq_len, heads, head_dim, device="cpu")
    seconds = timeit.repeat(
        lambda: local_attention(x, x, x, mask=Mask(causal=True)),
        number=1,
        repeat=4,
        timer=time.perf_counter,
    )
    return 2 * seq_len**2 * heads * head_dim / min(seconds)


def _host(tuning: Tuning) -> str:
    """Return the name of the machine on which constants were measured."""
    return tuning.fingerprint.get("host", "this machine")


def _lines(
    problem: Problem, found: Sequence[Projection], assumed: list[str], tuning: Tuning | None
) -> Iterator[str]:
    yield "scheme         ring x ulysses          ms  waiting    MB sent   messages"
    for one in found:
        sent, mesh = one.forward + one.backward, f"{one.ring} x {one.ulysses}"
        yield (
            f"{one.scheme:<14}{mesh:>15} {one.seconds * 1e3:>11.2f}"
            f"{one.exposed / one.seconds:>9.0%} {sent.bytes_sent / 1e6:>10.1f} {sent.messages:>10}"
        )
    yield (
        f"One layer, forward and backward; {problem.flops:.4g} operations/s per rank, "
        f"{problem.ranks} ranks, {problem.per_node} to a node."
    )
    for figure in assumed:
        yield f"Assumed, because it was not given: {figure}."
    if tuning is None:
        yield f"The error of these times is not known: {MEASURE}."
    else:
        median, worst = tuning.error
        yield (
            f"The model was off by {median:.0%} (median) and {worst:.0%} (95th percentile) for "
            f"collectives of {len(tuning.nodes)} ranks on {_host(tuning)}. Beyond those it is an "
            "extrapolation: congestion, stragglers and other jobs are not in it."
        )
