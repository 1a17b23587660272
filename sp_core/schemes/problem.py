"""Check the arguments that all schemes share, and compare them over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.arguments import check_tensor
from sp_core.attention import Logits, Terms, check_qkv
from sp_core.communicator import Communicator
from sp_core.errors import ShapeError
from sp_core.mask import Mask, plan_blocks
from sp_core.sharding import Sharding

Part = tuple[slice, slice]
"""A range of the queries of a shard, and one of the keys of another."""


@dataclass(frozen=True)
class Problem:
    """The arguments of an attention over all ranks, without q, k and v.

    `resident`: every rank made its k in one call of `shared_empty`, and its v in another.
    """

    comm: Communicator
    sharding: Sharding
    kv_sharding: Sharding
    mask: Mask
    logits: Logits
    resident: bool = False

    def against(
        self, kv_positions: Tensor, heads: slice, part: Part = (slice(None), slice(None))
    ) -> dict[str, Any]:
        """Return the arguments of `attend` for these heads of this rank's queries.

        Its keys are at `kv_positions`; `part` selects queries and keys.
        """
        return {
            "q_positions": self.sharding.positions(self.comm.rank)[part[0]],
            "kv_positions": kv_positions[part[1]],
            "mask": self.mask,
            "logits": self.logits.of_heads(heads),
        }

    def part(self, kv_positions: Tensor) -> Part:
        """Return the range of this rank's queries that see keys at these positions.

        And the range of keys that they see. A window reaches few tokens of another rank.
        """
        planned = plan_blocks(self.sharding.positions(self.comm.rank), kv_positions, self.mask)
        if not planned:
            return slice(0), slice(0)
        q_start, q_stop, kv_start, kv_stop, *_ = zip(*planned, strict=True)
        return slice(min(q_start), max(q_stop)), slice(min(kv_start), max(kv_stop))


def agree(
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
    """Check the arguments of a scheme and compare them over the ranks.

    Args:
        name: of the scheme.
        q: (B, S_local, H, D).
        k, v: (B, S_local, K, D).
        comm, sharding, kv_sharding, mask, return_lse, inner, softmax_scale, terms: as the scheme
            was given them.

    Returns:
        The arguments with their defaults filled in.

    Communication:
        One agreement.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError: on every rank, also if only one rank's
            arguments are wrong.
        CollectiveMismatch: the ranks' arguments differ.
    """
    arguments.check_communicator(comm)
    kv_sharding, mask = (
        sharding if kv_sharding is None else kv_sharding,
        Mask() if mask is None else mask,
    )
    problem = Problem(comm, sharding, kv_sharding, mask, Logits(0.0))

    def check() -> int:
        nonlocal problem
        arguments.check(return_lse=return_lse, inner=inner)
        for what, given in (("sharding", sharding), ("kv_sharding", kv_sharding)):
            arguments.check_type(
                what, given, Sharding, "Make one, such as Sharding.contiguous(seq_len, size)."
            )
        arguments.check_type(
            "mask", mask, Mask, "Pass Mask(causal=True), or None to see everything."
        )
        _check_tensors(q, k, v, comm)
        _check_lengths(q, k, problem)
        problem = replace(problem, logits=Logits.of(q, softmax_scale=softmax_scale, **terms))
        return _home(k, v, comm)

    homes = comm.agree_on(lambda: _signature(name, (q, k, v), problem, return_lse), check)
    return replace(problem, resident=homes[0] > 0 and len(set(homes)) == 1)


def _signature(
    name: str,
    tensors: tuple[Tensor, ...],
    problem: Problem,
    return_lse: bool,
) -> str:
    """Describe the call. The text must be the same on every rank; shard lengths may differ."""

    def shown(x: Tensor | None) -> str:
        if x is None:
            return "None"
        shape = ", ".join("S" if dim == 1 else str(length) for dim, length in enumerate(x.shape))
        return f"({shape}) {x.dtype} requires_grad={x.requires_grad and torch.is_grad_enabled()}"

    q, k, v, sinks = (shown(x) for x in (*tensors, problem.logits.sinks))
    return (
        f"{name}(q {q}, k {k}, v {v}, queries: {problem.sharding.fingerprint}, keys: "
        f"{problem.kv_sharding.fingerprint}, "
        f"{problem.mask}, {problem.logits}, sinks {sinks}, {return_lse=}) on {problem.comm.name}"
    )


def _home(k: Tensor, v: Tensor, comm: Communicator) -> int:
    """Identify the shared-memory allocations that hold k and v.

    Return 0 if either tensor lies elsewhere.
    """
    if comm.window is None or not (k.is_contiguous() and v.is_contiguous()):
        return 0
    numbers = [comm.window.number(x.view(-1)) for x in (k, v)]
    return 0 if -1 in numbers else numbers[0] << 31 | numbers[1] + 1


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, comm: Communicator) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(x, comm, name)
    check_qkv(q, k, v)


def _check_lengths(q: Tensor, k: Tensor, problem: Problem) -> None:
    comm = problem.comm
    for name, x, sharding in (("q", q, problem.sharding), ("k and v", k, problem.kv_sharding)):
        if sharding.size != comm.size:
            raise ShapeError(
                f"the sharding of {name} is for {sharding.size} ranks, {comm.name} has "
                f"{comm.size}. Make it with size={comm.size}."
            )
        if x.shape[1] != sharding.local_len(comm.rank):
            raise ShapeError(
                f"{name} on rank {comm.rank}: dim 1 has {x.shape[1]} tokens, the sharding gives "
                f"this rank {sharding.local_len(comm.rank)} of {sharding.seq_len}. Pass "
                "sharding.shard(x, rank, dim=1) of x (batch, tokens, heads, head_dim)."
            )
    problem.mask.check_lengths(problem.sharding.end, problem.kv_sharding.end)
