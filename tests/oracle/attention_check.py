"""Run one scheme on one attention problem, and compare results and all gradients.

The scheme is treated as unkindly as its contract allows: memory beside its inputs is NaN, one rank
may be late, and as soon as a rank has its results it overwrites its inputs.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from oracle import reference
from oracle.once import contents, once
from oracle.reference import Reference
from oracle.strategies import AttentionProblem, placed
from sp_core.collectives.api import all_reduce
from sp_core.communicator import Communicator
from sp_core.mask import Mask, plan_blocks
from sp_core.sharding import Sharding
from sp_core.testing.session import features, record_ratio
from sp_core.testing.tolerance import bound, check_close

Scheme = Callable[..., Any]
Results = dict[str, Tensor]
"""One rank's "out" and "lse", and those of "dq", "dk", "dv" and "dsinks" that are needed."""
LATE_SECONDS = 2e-3


def check_attention(
    name: str, scheme: Scheme, problem: AttentionProblem, group: Communicator
) -> None:
    """Run a scheme on this rank's shards, and compare its shards of the results with the reference.

    Args:
        name: the scheme's name, for messages.
        scheme: called with q, k, v of this rank and `sharding`, `kv_sharding`, `mask`,
            `return_lse=True` and the terms of the logits.
        problem: the problem to compute.
        group: the ranks that share the sequence.

    Raises:
        AssertionError: a result is wrong; the text names it and its worst element.
    """
    features({"scheme": name})
    shards = Shards(problem, group.rank, group.size, group.device)
    results = shards.results(scheme)
    shards.take_back()
    compare(name, shards, results, group)


def compare(name: str, shards: "Shards", results: Results, group: Communicator) -> None:
    """Compare one rank's results with the reference, after summing "dsinks" over the ranks.

    Raises:
        AssertionError: a result is wrong; the text names it and its worst element.
    """
    if "dsinks" in results:
        results = {**results, "dsinks": all_reduce(results["dsinks"].double(), comm=group)}
    assert results.get("lse", torch.zeros(())).dtype in (torch.float32, torch.float64), name
    for what, (expected, allowed) in shards.expected().items():
        if what in results:
            record_ratio(
                f"{name} {what}",
                check_close(f"{name} {what}", results[what].detach().cpu(), expected, allowed),
            )


class Shards:
    """Hold the shards of a problem on one rank, and run a scheme on them.

    Args:
        problem: as in `check_attention`.
        rank, size: this rank, and the number of ranks that share the sequence.
        device: the device of the rank's tensors.
    """

    def __init__(
        self, problem: AttentionProblem, rank: int, size: int, device: torch.device
    ) -> None:
        self.problem, self.rank, self.device = problem, rank, device
        self.sharding, self.kv_sharding = problem.sharding(size), problem.kv_sharding(size)
        self.whole = problem.tensors()
        self.upstream = (problem.upstream_gradient(), problem.upstream_lse_gradient())
        self.local = [
            placed(self.part(name, x).to(device), problem.storage).requires_grad_(needed)
            for name, x, needed in zip("qkv", self.whole, problem.needs_grad, strict=True)
        ]
        self.terms = problem.terms()
        if "sinks" in self.terms:
            sinks = self.terms["sinks"].to(device).clone()
            self.terms["sinks"] = sinks.requires_grad_(problem.seed % 2 == 0)
        self._given: list[tuple[Tensor, Tensor]] = []

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of an argument or a result of that name."""
        if name == "dsinks":
            return whole
        sharding = self.kv_sharding if name in ("k", "v", "dk", "dv") else self.sharding
        return sharding.shard(whole, self.rank, 2 if name == "lse" else 1)

    def results(self, scheme: Scheme) -> Results:
        """Return everything that the scheme gives this rank, forward and backward."""
        out, lse = self.run(scheme)
        return {"out": out.detach(), "lse": lse.detach(), **self.gradients(out, lse)}

    def run(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        """Run the scheme, and return its out and lse on this rank."""
        problem = self.problem
        kv_sharding = None if self.kv_sharding == self.sharding else self.kv_sharding
        given = (*self.local, *([self.terms["sinks"]] if "sinks" in self.terms else []))
        self._given = [(x, x.detach().clone()) for x in given]
        self._be_late(problem.seed)
        out, lse = scheme(
            *self.local,
            sharding=self.sharding,
            kv_sharding=kv_sharding,
            mask=problem.mask,
            return_lse=True,
            **self.terms,
        )
        return out, lse

    def gradients(self, out: Tensor, lse: Tensor) -> Results:
        """Return this rank's gradients that are needed, by name; of the sinks its summand."""
        leaves = [*self.local, self.terms.get("sinks")]
        names = ("dq", "dk", "dv", "dsinks")
        needing = {
            name: x
            for name, x in zip(names, leaves, strict=True)
            if x is not None and x.requires_grad
        }
        if not needing:
            return {}
        roots, upstream = [out], [self._upstream_of_out().to(out.device)]
        if self.upstream[1] is not None:
            roots.append(lse)
            upstream.append(self.part("lse", self.upstream[1]).clone().to(lse))
        self._given += [(x, x.clone()) for x in upstream]
        self._be_late(self.problem.seed + 1)
        unused = len(roots) > 1 and self.problem.upstream == "zero"  # out has no gradient then
        grads = torch.autograd.grad(roots[unused:], list(needing.values()), upstream[unused:])
        return dict(zip(needing, grads, strict=True))

    def take_back(self) -> None:
        """Check that inputs are unchanged, and overwrite them: no other rank may need them."""
        assert all(torch.equal(x, before) for x, before in self._given), (
            "the scheme has changed its inputs"
        )
        for x, _ in self._given:
            x.new_empty(0, dtype=torch.uint8).set_(x.detach().untyped_storage()).fill_(0xFF)

    def reference(self) -> Reference:
        """Return the dense results and gradients of the whole sequence."""
        definition: dict[str, Any] = {
            "q_positions": ascending(self.sharding),
            "kv_positions": ascending(self.kv_sharding),
            **asdict(self.problem.mask),
            **self.problem.terms(),
        }
        given = (*self.whole, *self.upstream)
        key = ("attention", repr(definition), contents(*given, definition.get("sinks")))
        return once(key, lambda: reference.attention(*given, **definition))

    def expected(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return this rank's part of every expected result, and by how much it may be off."""
        values, scales, growth = self.reference()
        partials = partial_results(self.sharding, self.kv_sharding, self.problem.mask)
        dtype = self.problem.torch_dtype
        return {
            what: (
                self.part(what, value),
                bound(self.part(what, scales[what]), dtype, growth, partials),
            )
            for what, value in values.items()
        }

    def _upstream_of_out(self) -> Tensor:
        """Return this rank's gradient of out, with the strides that the problem asks for."""
        mine = self.part("out", self.upstream[0])
        if self.problem.upstream in ("expanded", "zero"):
            return mine[:1, :1, :1, :1].clone().expand_as(mine)
        return placed(mine, "transposed" if self.problem.upstream == "transposed" else "plain")

    def _be_late(self, rank: int) -> None:
        if self.problem.late and rank % self.sharding.size == self.rank:
            time.sleep(LATE_SECONDS)


def ascending(sharding: Sharding) -> list[int]:
    """Return the global positions of all tokens in ascending order."""
    return sorted(int(p) for rank in range(sharding.size) for p in sharding.positions(rank))


@lru_cache(maxsize=64)
def partial_results(sharding: Sharding, kv_sharding: Sharding, mask: Mask) -> int:
    """Return an upper bound of the number of partial results that kernels round for one element."""
    ranks = range(sharding.size)
    return 1 + sum(
        len(plan_blocks(sharding.positions(i), kv_sharding.positions(j), mask))
        for i in ranks
        for j in ranks
    )
