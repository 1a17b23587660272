"""List the capabilities that a library's attention may have, and draw problems that test each one.

A problem is plain in everything that its capability is not about. The length is even, every scheme
can split the heads, and dtype and layout are the library's usual ones. So a fault shows under the
capability that it belongs to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from oracle.attention_check import Shards
from oracle.strategies import LAYOUTS, AttentionProblem, attention_problems, boundaries, windows
from torch import Tensor

from sp_core.mask import Mask
from sp_core.sharding import Sharding

CAPABILITIES = {
    "full": "no mask",
    "causal": "a token sees itself and those before it",
    "backward": "gradients of q, k and v, where the rest is plain",
    "window": "the nearest w tokens, causal",
    "documents": "packed documents, causal within each",
    "GQA": "2 or 3 query heads to a key/value head",
    "MQA": "one key/value head",
    "uneven length": "a length that the number of ranks does not divide",
    "uneven heads": "more heads than ranks, not a multiple",
    "contiguous": "rank r has the r-th piece; causal",
    "zigzag": "rank r has pieces r and 2P-1-r of 2P; causal",
    "striped": "rank r has tokens r, r+P, ...; causal",
    "float64": "errors at the round-off of float64; causal",
    "bfloat16": "errors at the round-off of bfloat16; causal",
}
"""Every capability, in the order in which they are tried."""
FORWARD_ONLY = ("full", "causal")
"""The capabilities that are tried without gradients."""
CALL = "attend"
"""The name of the adapter's function that is tested."""

LONGEST = 24
Positions = tuple[tuple[int, ...], ...]
PlacesOf = Callable[[str, int, int, tuple[int, ...] | None], Positions]
"""A function of layout, length, number of ranks and document boundaries that returns the positions
of each rank."""


@dataclass(frozen=True)
class Posed(AttentionProblem):
    """A problem that gives the positions of each rank, because layouts differ between libraries."""

    shards: Positions = ()

    def sharding(self, size: int) -> Sharding:
        """Return the sharding with these positions."""
        return Sharding.from_positions(self.shards)

    def kv_sharding(self, size: int) -> Sharding:
        """Return the same sharding, because every problem is self-attention."""
        return self.sharding(size)


def results(
    problem: Posed, rank: int, call: Callable[..., Tensor], variant: str, comm: Any
) -> dict[str, Tensor]:
    """Call a library on this rank; return its output and gradients, by name."""
    shards = _shards(problem, rank)

    def scheme(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, **_: Any) -> tuple[Tensor, None]:
        seen = {"causal": mask.causal, "window": mask.window, "documents": mask.documents}
        how: dict[str, Any] = {"layout": problem.layout, "softmax_scale": problem.softmax_scale}
        how |= {"variant": variant, "shards": problem.shards}
        return call(q, k, v, **seen, **how, comm=comm), None

    out, lse = shards.run(scheme)
    return {"out": out.detach(), **shards.gradients(out, lse)}


def expected(problem: Posed, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return, by name, each expected result of this rank and the error that is allowed."""
    return _shards(problem, rank).expected()


def _shards(problem: Posed, rank: int) -> Shards:
    return Shards(problem, rank, len(problem.shards), torch.device("cpu"))


@dataclass(frozen=True)
class Needs:
    """The problems that a library can take.

    Args:
        layouts: the layouts that it offers, its usual one first.
        full_layout: the layout for attention without a mask.
        dtype: the dtype, except for the capabilities that are about dtypes.
        places: a function that returns the positions of each rank; None for our own layouts.
        document_pieces: each document's length is a multiple of this number times the number of
            ranks; documents have any length if it is 0.
        one_sequence: whether the batch size must be 1.
    """

    layouts: tuple[str, ...] = ("contiguous",)
    full_layout: str = "contiguous"
    dtype: str = "float32"
    places: PlacesOf | None = None
    document_pieces: int = 0
    one_sequence: bool = False


def places(layout: str, seq_len: int, size: int, documents: tuple[int, ...] | None) -> Positions:
    """Return the positions of each rank in a layout of this project."""
    sharding = LAYOUTS[layout](seq_len, size)
    return tuple(tuple(sharding.positions(rank).tolist()) for rank in range(size))


@st.composite
def problems(
    draw: st.DrawFn, capability: str, size: int, needs: Needs, gradients: bool, full: bool = True
) -> Posed:
    """Draw problems of one capability on `size` ranks.

    Args:
        draw: Hypothesis' function for drawing.
        capability: a name in `CAPABILITIES`.
        size: the number of ranks.
        needs: the problems that the library can take.
        gradients: whether gradients are computed.
        full: whether problems of "backward" may have no mask.
    """
    drawn = draw(attention_problems(LONGEST))
    seq_len = _length(drawn.seq_len, size, capability)
    kv_heads, group = _heads(drawn, size, capability)
    dtype = capability if capability in ("float64", "bfloat16") else needs.dtype
    mask = _mask(draw, capability, seq_len, max(1, needs.document_pieces * size), full)
    layout = (
        capability
        if capability in LAYOUTS
        else needs.layouts[0]
        if mask.causal
        else needs.full_layout
    )
    seq_len = mask.documents[-1] if mask.documents else seq_len
    plain = AttentionProblem(
        batch=1 if needs.one_sequence else drawn.batch,
        seq_len=seq_len,
        kv_len=seq_len,
        kv_heads=kv_heads,
        group=group,
        head_dim=8 if drawn.head_dim < 16 else 16,
        dtype=dtype,
        layout=layout,
        kv_layout=layout,
        mask=mask,
        softmax_scale=drawn.softmax_scale,
        magnitude=1.0,
        values="normal",
        upstream="normal",
        needs_grad=(gradients,) * 3,
        storage="plain",
        seed=3 * drawn.seed + 1,  # with these seeds the log-sum-exp has no gradient
    )
    return Posed(
        **vars(plain), shards=(needs.places or places)(layout, seq_len, size, mask.documents)
    )


def _length(drawn: int, size: int, capability: str) -> int:
    """Return a multiple of 2 * size, or for "uneven length" a length that size does not divide."""
    if capability != "uneven length":
        return max(1, round(drawn / (2 * size))) * 2 * size
    return drawn + size + (drawn % size == 0)


def _heads(drawn: AttentionProblem, size: int, capability: str) -> tuple[int, int]:
    """Return the number of key/value heads, and the number of query heads for each of them."""
    twice = 2 - drawn.kv_heads % 2
    if capability == "GQA":
        return size * twice, 3 - drawn.group % 2
    if capability == "MQA":
        return 1, size * twice
    if capability == "uneven heads":
        return size + 1 + (drawn.kv_heads - 1) % (size - 1), 1
    return size * twice, 1


def _mask(draw: st.DrawFn, capability: str, seq_len: int, unit: int, full: bool) -> Mask:
    if capability == "full":
        return Mask()
    if capability == "backward":
        return Mask(causal=not full or draw(st.booleans()))
    if capability == "window":
        return Mask(causal=True, window=draw(windows(seq_len, seq_len)))
    if capability == "documents":
        number = draw(st.integers(1, 3))
        cuts = sorted(set(draw(boundaries(max(1, seq_len // unit), number))))
        return Mask(causal=True, documents=tuple(cut * unit for cut in cuts))
    return Mask(causal=True)


def told(problem: Posed) -> dict[str, Any]:
    """Return a problem as plain data."""
    mask = problem.mask
    kept = (
        "batch",
        "seq_len",
        "kv_heads",
        "group",
        "head_dim",
        "dtype",
        "layout",
        "softmax_scale",
        "seed",
    )
    return {
        **{name: getattr(problem, name) for name in kept},
        "causal": mask.causal,
        "window": mask.window,
        "documents": mask.documents and list(mask.documents),
        "gradients": problem.needs_grad[0],
        "shards": [list(shard) for shard in problem.shards],
    }


def smallest(data: dict[str, Any]) -> str:
    """Describe a problem, given as plain data, in one line for a table."""
    heads = data["kv_heads"]
    parts = [f"P {len(data['shards'])}", f"B {data['batch']}", f"S {data['seq_len']}"]
    parts += [f"heads {heads * data['group']}:{heads}", f"D {data['head_dim']}"]
    parts += [data["dtype"], data["layout"], "causal" if data["causal"] else "full"]
    parts += [f"window {data['window']}"] * (data["window"] is not None)
    parts += [f"documents {tuple(data['documents'] or ())}"] * (data["documents"] is not None)
    parts += [f"scale {data['softmax_scale']}"] * (data["softmax_scale"] is not None)
    return ", ".join(parts)
