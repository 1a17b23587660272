"""Try what each scheme can do: `python -m oracle.capabilities` prints the table.

For each cell a scheme computes a small problem on four ranks (threads), compared with the float64
reference. "yes" means right within the tolerance, forward and backward; "refused" means an error on
every rank. Anything else ends this program without a table. Bytes are those of the counters, in
units of a rank's own K and V, for even shards and the full mask.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from oracle.attention_check import Scheme, Shards, check_attention
from oracle.strategies import AttentionProblem
from sp_core.mask import Mask
from sp_core.mesh import Mesh
from sp_core.schemes import SCHEMES, hybrid_attention
from sp_core.testing.run import run_threads

RANKS = 4
BASE = AttentionProblem(
    *(2, 16, 16, 4, 1, 8, "float64", "contiguous", "contiguous", Mask(), None, 1.0),
    *("normal", "normal", (True, True, True), "plain", 1),
)
PROBLEMS = {
    "full attention": (BASE,),
    "causal": (replace(BASE, mask=Mask(causal=True)),),
    "sliding window, causal and not": tuple(
        replace(BASE, mask=Mask(causal, window=6)) for causal in (True, False)
    ),
    "packed documents": (replace(BASE, mask=Mask(causal=True, documents=(0, 3, 3, 11, 16))),),
    "window inside documents": (replace(BASE, mask=Mask(window=3, documents=(0, 7, 16))),),
    "zigzag": (replace(BASE, layout="zigzag", kv_layout="zigzag", mask=Mask(causal=True)),),
    "striped": (replace(BASE, layout="striped", kv_layout="striped", mask=Mask(causal=True)),),
    "balanced": (replace(BASE, layout="balanced", kv_layout="balanced", mask=Mask(causal=True)),),
    "a length that P does not divide": (replace(BASE, seq_len=18, kv_len=18),),
    "fewer tokens than ranks": (replace(BASE, seq_len=3, kv_len=3),),
    "cross attention, sharded differently": (replace(BASE, kv_len=9, kv_layout="striped"),),
    "GQA": (replace(BASE, group=2),),
    "MQA: one key/value head for 4 ranks": (replace(BASE, kv_heads=1, group=4),),
    "heads that P does not divide": (replace(BASE, kv_heads=3, group=2),),
    "fewer heads than ranks": (replace(BASE, kv_heads=1, group=3),),
    "float32": (replace(BASE, dtype="float32"),),
    "bfloat16 and float16": tuple(replace(BASE, dtype=dtype) for dtype in ("bfloat16", "float16")),
    "soft-capped logits": (replace(BASE, softcap=0.7, mask=Mask(causal=True), group=2),),
    "attention sinks": tuple(
        replace(BASE, sinks=1.0, seed=2, kv_heads=kv_heads, group=2) for kv_heads in (4, 3, 1)
    ),
    "ALiBi slopes, causal and not": tuple(
        replace(
            BASE,
            alibi=0.5,
            layout="zigzag",
            kv_layout="zigzag",
            mask=Mask(causal),
            kv_heads=kv_heads,
            group=group,
        )
        for causal in (True, False)
        for kv_heads, group in ((4, 1), (3, 2), (1, 4))
    ),
    "gradient of the log-sum-exp": (replace(BASE, seed=3),),
}
NAMES = (*SCHEMES, "hybrid 2 x 2")
Body = Callable[[Mesh, Scheme], str]


def columns(mesh: Mesh) -> dict[str, Scheme]:
    """Return the schemes by name, on a mesh with the axes `ring` and `ulysses`."""
    found: dict[str, Scheme] = {
        name: partial(function, comm=mesh["ring", "ulysses"]) for name, function in SCHEMES.items()
    }
    return {**found, NAMES[-1]: partial(hybrid_attention, mesh=mesh)}


def on_ranks(body: Body) -> list[str]:
    """Return the answer of `body` for each scheme; all ranks must give the same one."""
    answers: list[list[str]] = [[] for _ in range(RANKS)]

    def run(comm: Any) -> None:
        with Mesh(comm, ring=2, ulysses=2) as mesh:
            answers[comm.rank] = [body(mesh, scheme) for scheme in columns(mesh).values()]

    run_threads(RANKS, run)
    if any(other != answers[0] for other in answers):
        raise AssertionError(f"the ranks answer differently: {answers}")
    return answers[0]


def solves(problems: tuple[AttentionProblem, ...], mesh: Mesh, scheme: Scheme) -> str:
    """Check that a scheme gives the reference's results for all problems; return "yes" then."""
    for problem in problems:
        check_attention("capability", scheme, problem, mesh["ring", "ulysses"])
    return "yes"


def checkpoints(mesh: Mesh, scheme: Scheme) -> str:
    """Check that a checkpointed call has the same gradients; return "yes" then."""
    shards = Shards(BASE, mesh.rank, mesh.size, mesh.device)

    def again(*local: torch.Tensor) -> Any:
        shards.local = list(local)
        return shards.run(scheme)

    leaves = shards.local
    plain = torch.autograd.grad(again(*leaves)[0].sum(), leaves)
    kept = torch.autograd.grad(checkpoint(again, *leaves, use_reentrant=False)[0].sum(), leaves)
    if not all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True)):
        raise AssertionError("checkpointing changes the gradients")
    return "yes"


def differentiates_twice(mesh: Mesh, scheme: Scheme) -> str:
    """Return "yes" if the gradient has a gradient, and "refused" if the scheme refuses it."""
    shards = Shards(BASE, mesh.rank, mesh.size, mesh.device)
    out, _ = shards.run(scheme)
    (grad, *_) = torch.autograd.grad(out.square().sum(), shards.local, create_graph=True)
    try:
        torch.autograd.grad(grad.sum(), shards.local)
    except RuntimeError as error:
        if "twice" not in str(error) and "once" not in str(error):
            raise
        return "refused"
    return "yes"


def sends(problem: AttentionProblem, backward: bool, mesh: Mesh, scheme: Scheme) -> str:
    """Return the bytes that a rank sends by its counters, in units of its own K and V."""
    shards = Shards(problem, mesh.rank, mesh.size, mesh.device)
    groups = (mesh["ring", "ulysses"], mesh["ring"], mesh["ulysses"])

    def sent() -> int:
        return sum(group.counters.total().bytes_sent for group in groups)

    before = sent()
    out = scheme(*shards.local, sharding=shards.sharding)
    if backward:
        before = sent()
        torch.autograd.grad(out.sum(), shards.local)
    return f"{(sent() - before) / (2 * shards.local[1].nbytes):g}"


def questions() -> Iterator[tuple[str, Body]]:
    """Yield each question about a scheme, with the function that answers it."""
    for asked, problems in PROBLEMS.items():
        yield asked, partial(solves, problems)
    yield "activation checkpointing", checkpoints
    yield "second derivative", differentiates_twice
    for text, problem in (
        ("as many K/V heads as heads", BASE),
        ("4 heads to a K/V head", replace(BASE, group=4)),
    ):
        for way, backward in (("forward", False), ("backward", True)):
            yield f"sent, {way}, {text}", partial(sends, problem, backward)


def table() -> str:
    """Return the table as Markdown."""
    lines = [["on four ranks", *NAMES], ["---"] * (len(NAMES) + 1)]
    lines += [[question, *on_ranks(body)] for question, body in questions()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
