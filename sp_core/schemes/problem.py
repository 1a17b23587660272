"""Check the arguments of a scheme (`check_call`), and compute attention block by block (`run`).

A `Scheme`, such as the ring, has two functions. `visits` brings keys and values to a rank.
`gradients` computes the backward, and sums dk and dv over the ranks. Terms:

- block: the keys and values of one rank, or of all ranks for some heads.
- group: a range of query heads, and the key/value heads that they read.
- visit: one block while it is available on this rank, and the groups to compute with it.

The forward attends to the block of each visit and merges the results by their log-sum-exp. In the
backward the scheme makes the same visits, and sums the gradients of each block over the ranks.
Shapes: B batch, S sequence, H heads, K key/value heads, D head dim, P ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.attention import (
    Logits,
    Terms,
    accumulation_dtype,
    add_sinks,
    attend,
    attend_backward,
    check_qkv,
    merge_into,
    sinks_gradient,
)
from sp_core.attention.function import Saved, attention, differentiable_once, without_autocast
from sp_core.communicator import Communicator
from sp_core.compiling import EagerFunction
from sp_core.errors import ShapeError
from sp_core.mask import Mask, Positions, plan_blocks
from sp_core.schemes.heads import Group, head_groups
from sp_core.schemes.reach import Shown, hops, seen_blocks, shown_keys
from sp_core.segments import positions_of
from sp_core.sharding import Sharding, check_sharding

Ranges = tuple[slice, slice]
"""(queries, keys): a range of this rank's queries and a range of a block's keys, as indices."""

KeyValue = tuple[Tensor, Tensor] | Tensor
"""Keys and values, or the gradients of keys and values: a pair of (B, S_block, K, D) tensors, or
both in one tensor (2, B, S_block, K, D)."""


@dataclass(frozen=True)
class Problem:
    """Hold the arguments of one attention call over all ranks, except q, k and v.

    Args:
        comm, sharding, kv_sharding, mask: as in the schemes.
        logits: scale of q k^T, and the terms that change the logits.
        resident: whether the k of all ranks come from one collective call of `shared_empty`, and
            the v from another, without saved-tensor hooks. Other ranks then read k and v in place.
    """

    comm: Communicator
    sharding: Sharding
    kv_sharding: Sharding
    mask: Mask
    logits: Logits
    resident: bool = False

    def against(
        self, kv_positions: Positions, heads: slice, part: Ranges = (slice(None), slice(None))
    ) -> dict[str, Any]:
        """Return the keyword arguments of `attend` for some queries of this rank and a block.

        Args:
            kv_positions: global positions of the block's keys.
            heads: the range of query heads, for the terms of the logits.
            part: (range of this rank's queries, range of the block's keys).
        """
        return {
            "q_positions": positions_of(self.sharding.segments[self.comm.rank])[part[0]],
            "kv_positions": kv_positions[part[1]],
            "mask": self.mask,
            "logits": self.logits.of_heads(heads),
        }

    @property
    def hops(self) -> tuple[int, ...]:
        """Return for each rank how many times a ring passes that rank's keys on (`reach.hops`)."""
        return hops(self.sharding, self.kv_sharding, self.mask)

    def sees(self, owner: int) -> bool:
        """Return whether any query of this rank sees any key of rank `owner`."""
        return seen_blocks(self.sharding, self.kv_sharding, self.mask, self.comm.rank)[owner]

    @property
    def shown(self) -> Shown:
        """Return which keys of each rank other ranks see (`reach.shown_keys`)."""
        return shown_keys(self.sharding, self.kv_sharding, self.mask)

    def part(self, kv_positions: Positions) -> Ranges:
        """Return a range of this rank's queries and one of keys that contain all visible pairs.

        `kv_positions` are the global positions of the block's keys. Without any visible pair
        both ranges are whole.
        """
        queries = positions_of(self.sharding.segments[self.comm.rank])
        planned = plan_blocks(queries, kv_positions, self.mask)
        if not planned:
            return slice(None), slice(None)
        q_start, q_stop, kv_start, kv_stop, *_ = zip(*planned, strict=True)
        return slice(min(q_start), max(q_stop)), slice(min(kv_start), max(kv_stop))


def check_call(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    comm: Communicator,
    sharding: Sharding,
    kv_sharding: Sharding | None,
    mask: Mask | None,
    return_lse: bool,
    inner: Callable[..., Any] | None = None,
    softmax_scale: float | None,
    **terms: Unpack[Terms],
) -> Problem:
    """Check a scheme's arguments, and that they match on all ranks. Return them as a `Problem`.

    Args:
        name: the name of the scheme's function, for error texts.
        q: (B, S/P, H, D), this rank's queries.
        k, v: (B, S/P, K, D), this rank's keys and values.
        comm, sharding, kv_sharding, mask, return_lse, inner, softmax_scale, terms: the scheme's
            arguments of the same names. Only Ulysses passes `inner`.

    Returns:
        The arguments; where kv_sharding, mask or softmax_scale were None, with their defaults.

    Communication:
        One agreement (32-byte all-reduce).

    Raises:
        TypeError: `comm` is not a communicator; on this rank only.
        TypeError, ValueError, ShapeError, DtypeError, DeviceError: on every rank, even if only one
            rank's arguments are wrong.
        CollectiveMismatch: the ranks' arguments differ; on every rank.
        RankError: the communicator was freed, on this rank or on another one.
    """
    arguments.check_communicator(comm)
    kv_sharding = sharding if kv_sharding is None else kv_sharding
    mask = Mask() if mask is None else mask
    problem = Problem(comm, sharding, kv_sharding, mask, Logits(0.0))

    def check() -> int:
        nonlocal problem
        arguments.check(return_lse=return_lse, inner=inner)
        arguments.check_type(
            "mask", mask, Mask, "Pass Mask(causal=True), or None to see everything."
        )
        for what, x in (("q", q), ("k", k), ("v", v)):
            arguments.check_tensor(x, comm, what)
        check_qkv(q, k, v)
        _check_lengths(q, k, problem)
        problem = replace(problem, logits=Logits.of(q, softmax_scale=softmax_scale, **terms))
        arguments.check_kept(q, k, v, problem.logits.sinks)
        return _memory_id((k, v), comm)

    numbers = comm.agree_on(lambda: _signature(name, (q, k, v), problem, return_lse), check)
    return replace(problem, resident=min(numbers) == max(numbers) >= 0)


def _signature(name: str, tensors: tuple[Tensor, ...], problem: Problem, return_lse: bool) -> str:
    """Return a text of the arguments that must match on all ranks; "S" replaces shard lengths."""

    def describe(x: Tensor | None) -> str:
        if x is None:
            return "None"
        shape = ", ".join("S" if dim == 1 else str(length) for dim, length in enumerate(x.shape))
        return f"({shape}) {x.dtype} requires_grad={x.requires_grad and torch.is_grad_enabled()}"

    q, k, v, sinks = (describe(x) for x in (*tensors, problem.logits.sinks))
    return (
        f"{name}(q {q}, k {k}, v {v}, queries: {problem.sharding.fingerprint}, keys: "
        f"{problem.kv_sharding.fingerprint}, "
        f"{problem.mask}, {problem.logits}, sinks {sinks}, {return_lse=}) on {problem.comm.name}"
    )


def _memory_id(kv: KeyValue, comm: Communicator) -> int:
    """Return a number >= 0 that identifies the shared-memory allocations of k and of v.

    Return a number < 0 if k or v is not at the start of such memory, or if saved-tensor hooks may
    give copies of them to the backward. Ranks number their allocations alike, so equal numbers mean
    tensors of the same calls of `shared_empty`.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks or comm.window is None or not all(x.is_contiguous() and not x.is_neg() for x in kv):
        return -1
    of_k, of_v = (comm.window.number(x.view(-1)) for x in kv)
    return of_k << 31 | of_v


def _check_lengths(q: Tensor, k: Tensor, problem: Problem) -> None:
    """Raise ShapeError if the lengths of q or k, their sharding and the mask's documents differ."""
    comm = problem.comm
    for name, argument, x, sharding in (
        ("q", "sharding", q, problem.sharding),
        ("k and v", "kv_sharding", k, problem.kv_sharding),
    ):
        check_sharding(sharding, comm, name, argument)
        if x.shape[1] != sharding.local_len(comm.rank):
            raise ShapeError(
                f"{name} on rank {comm.rank}: dim 1 has {x.shape[1]} tokens, the sharding gives "
                f"this rank {sharding.local_len(comm.rank)} of {sharding.seq_len}. Pass "
                "sharding.shard(x, rank, dim=1) of x (batch, tokens, heads, head_dim)."
            )
    problem.mask.check_lengths(problem.sharding.end, problem.kv_sharding.end)


class Visit(NamedTuple):
    """Describe a block that is available on this rank.

    Args:
        step: number of the visit, from 0 on.
        positions: global positions of the block's S_block keys.
        groups: the heads to compute: pairs of query heads and the key/value heads of `held` that
            they read.
        held: the block, k and v (B, S_block, K, D). In a ring, None if no query of this rank sees
            any of its keys.
    """

    step: int
    positions: Positions
    groups: Sequence[Group]
    held: KeyValue | None


Upstream = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""The tensors from which a backward starts: grad_out, q and out, (B, H, S/P, D) each; lse and its
gradient, (B, H, S/P) each. The gradient of lse is None if lse was not used."""


class Scheme(NamedTuple):
    """Define how blocks reach a rank, and how their gradients return to the owners.

    Both functions communicate, so all ranks call them together.

    Args:
        name: the public function's name, for error texts.
        visits: called as visits(k, v, problem, groups) in the forward; yields equally many visits
            on every rank.
        gradients: called as gradients(upstream, k, v, problem, groups, with_kv) in the backward;
            returns dq (B, H, S/P, D), dk and dv (B, S/P, K, D). Without `with_kv` the values of dk
            and dv are not used.
    """

    name: str
    visits: Callable[[Tensor, Tensor, Problem, Sequence[Group]], Iterator[Visit]]
    gradients: Callable[
        [Upstream, Tensor, Tensor, Problem, Sequence[Group], bool], tuple[Tensor, Tensor, Tensor]
    ]


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Compute attention by a scheme, with gradients. `check_call` has checked the arguments.

    All ranks call this together, because the functions of `scheme` communicate. Return out
    (B, S/P, H, D) in the dtype of q, and lse (B, H, S/P) in float32 or wider.
    """
    if problem.comm.size == 1:
        call = problem.against(positions_of(problem.kv_sharding.segments[0]), slice(None))
        return attention(q, k, v, problem.logits.sinks, call | {"between": problem.comm.poll})
    return _blockwise(q, k, v, problem.logits.sinks, problem, scheme)


class _Blockwise(EagerFunction):
    """Autograd function of `run`: merge the results of blocks; let the scheme sum the gradients.

    The backward first checks that all ranks run the backward of the same call, unless the
    communicator has `check="off"`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        problem: Problem,
        scheme: Scheme,
    ) -> tuple[Tensor, Tensor]:
        ctx.problem, ctx.scheme, ctx.agree = problem, scheme, problem.comm.numbered()
        ctx.set_materialize_grads(False)
        with without_autocast(q):
            out, lse = _attend(q.transpose(1, 2), k, v, problem, scheme)
            add_sinks(out.transpose(1, 2), lse, sinks)
        out = out.to(q.dtype).detach()  # one of several outputs must be no view
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        check = partial(arguments.check_gradients, ctx.problem.comm, grad_out, grad_lse)
        ctx.agree(f"the backward of {ctx.scheme.name}", check)
        q, k, v, out, lse, sinks = saved
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        upstream = (grad_out.transpose(1, 2), q.transpose(1, 2), out.transpose(1, 2), lse, grad_lse)
        groups = head_groups(q.shape[2], k.shape[2])
        _, of_k, of_v, *_ = ctx.needs_input_grad
        dq, dk, dv = ctx.scheme.gradients(upstream, k, v, ctx.problem, groups, of_k or of_v)
        dsinks = sinks_gradient(upstream[0], upstream[2], lse, grad_lse, sinks)
        return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


_blockwise: Callable[..., tuple[Tensor, Tensor]] = _Blockwise.apply


def _attend(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, scheme: Scheme
) -> tuple[Tensor, Tensor]:
    """Attend to the block of every visit, and merge the results, without sinks.

    q is (B, H, S/P, D), k and v are (B, S/P, K, D). Return out (B, S/P, H, D) and lse (B, H, S/P),
    both in float32 or wider.
    """
    dtype, poll = accumulation_dtype(q.dtype), problem.comm.poll
    results: dict[int, tuple[Tensor, Tensor]] = {}
    for visit in scheme.visits(k, v, problem, head_groups(q.shape[1], k.shape[2])):
        if visit.held is not None:
            i, j = problem.part(visit.positions)
            for heads, kv in visit.groups:
                among = problem.against(visit.positions, heads, (i, j))
                given = (q[:, heads, i], *heads_first(visit.held, kv, j))
                part = attend(*given, **among, out_dtype=dtype, between=poll)
                if heads.start not in results and part[1].shape[2] == q.shape[2]:
                    results[heads.start] = part
                else:
                    out, lse = results.setdefault(heads.start, _nothing(q[:, heads], dtype))
                    merge_into(out[:, :, i], lse[:, :, i], *part)
                del given, part
                poll()
        del visit
    outs, lses = zip(*(results.values() or [_nothing(q, dtype)]), strict=True)
    return joined([out.transpose(1, 2) for out in outs], 2), joined(lses, 1)


def block_gradients(
    upstream: Upstream,
    held: KeyValue,
    positions: Positions,
    group: Group,
    problem: Problem,
    part: Ranges = (slice(None), slice(None)),
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of attention to one block, for a group of heads. No communication.

    Args:
        upstream: the gradients of the outputs, and the tensors that the forward saved.
        held: the block, k and v (B, S_block, K, D).
        positions: global positions of the block's S_block keys.
        group: the query heads, and the key/value heads of `held` that these read.
        problem: the attention call, as `check_call` returned it.
        part: (range of this rank's queries, range of the block's keys); all if not given.

    Returns:
        dq (B, H, S_q, D), dk and dv (B, K, S_kv, D), in float32 or wider: what this block adds to
        the gradients. H and K count the heads of the group, S_q and S_kv the tokens of `part`.
    """
    do, q, out, lse, grad_lse = upstream
    heads, kv = group
    at = (slice(None), heads, part[0])
    return attend_backward(
        *(do[at], q[at], *heads_first(held, kv, part[1]), out[at], lse[at]),
        **problem.against(positions, heads, part),
        grad_lse=None if grad_lse is None else grad_lse[at],
        between=problem.comm.poll,
    )


def _nothing(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return out = 0 (B, H, S, D) and lse = -inf (B, H, S), as for queries q that see no key."""
    return torch.zeros_like(q, dtype=dtype), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors of groups of heads along `dim`. A single tensor is returned uncopied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def heads_first(kv: KeyValue, heads: slice, tokens: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return views (B, K, S, D) of some heads and tokens of a block's k and v, (B, S, K, D)."""
    return kv[0][:, tokens, heads].transpose(1, 2), kv[1][:, tokens, heads].transpose(1, 2)
