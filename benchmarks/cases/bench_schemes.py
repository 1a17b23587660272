"""Time attention under every scheme, layout and mask, forward and with its backward.

A scheme that is added to the library is timed without a change here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

import sp_core as sp
from benchmarks.cases.case import Phases, Work, dtype_of, training
from benchmarks.cases.setting import HYBRID, mesh_of
from benchmarks.records import AXIS, Case, make_case
from sp_core import cost
from sp_core.schemes import SCHEMES
from sp_core.schemes.hybrid import groups_of
from sp_core.transport import MAY_BE_REFUSED, MESSAGES, NAMES

SHAPE = {"batch": 1, "seq": 1024, "heads": 8, "kv_heads": 4, "head_dim": 32}
LAYOUTS = ("contiguous", "zigzag", "striped")
MASKS = {"full": sp.Mask(), "causal": sp.Mask(causal=True)}
DIRECTIONS = ("forward", "both")
WINDOW = "window"
"""The transport over shared memory: ranks read keys and values in place. It has one layout here."""

QUICK = {("zigzag", "causal", "forward"), ("zigzag", "causal", "both")}
BACKWARD_FLOPS = 2.5  # times the forward's: five products of matrices instead of two


def cases(ranks: int, device: str = "cpu", shape: dict[str, int] = SHAPE) -> list[Case]:
    """Return all cases for a number of ranks and a kind of device."""
    return [
        make_case(
            "schemes",
            scheme,
            mesh,
            shape,
            transport,
            direction=direction,
            layout=layout,
            mask=mask,
            detail=transport if transport == WINDOW or len(MESSAGES[device]) > 1 else None,
        )
        for scheme in (*SCHEMES, HYBRID)
        if (mesh := mesh_of(scheme, ranks)) is not None
        for transport in NAMES[device]
        if transport not in MAY_BE_REFUSED
        for layout in (LAYOUTS if transport in MESSAGES[device] else LAYOUTS[1:2])
        for mask in MASKS
        for direction in DIRECTIONS
    ]


def quick(case: Case) -> bool:
    """Return whether a case is part of the small selection."""
    wanted = (case.layout, case.mask, case.direction) in QUICK and case.transport != WINDOW
    return wanted and (case.scheme != HYBRID or case.ranks > 1)


def build(case: Case, mesh: sp.Mesh, sync: Callable[[], None]) -> Work:
    """Return this rank's work: one call of attention."""
    sharding = sharding_of(case)
    own, (heads, kv_heads, head_dim) = sharding.local_len(mesh.rank), widths(case)
    q, k, v = (
        normal((case.shape["batch"], own, n, head_dim), case, mesh, mesh.rank * 3 + i)
        for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    phases = Phases(communicators(case, mesh), sync)
    call = attention_of(case, mesh)

    def forward() -> Tensor:
        with phases("attention"):
            out: Tensor = call(q, k, v, sharding=sharding, mask=MASKS[str(case.mask)])
        return out

    return Work(
        training(case.direction, forward, (q, k, v), phases),
        phases,
        (q, k, v),
        sent=sent(case, mesh),
        flops=flops(case),
        tokens=case.shape["batch"] * case.shape["seq"],
    )


def communicators(case: Case, mesh: sp.Mesh) -> list[sp.Communicator]:
    """Return all communicators that the scheme sends on."""
    axes = tuple(case.mesh)
    return [mesh[axis] for axis in axes] + ([mesh[axes]] if len(axes) > 1 else [])


def attention_of(case: Case, mesh: sp.Mesh) -> Callable[..., Any]:
    """Return the scheme's function, with its communicator or mesh filled in."""
    if case.scheme == HYBRID:
        return partial(sp.hybrid_attention, mesh=mesh)
    return partial(SCHEMES[case.scheme], comm=mesh[AXIS])


def sharding_of(case: Case) -> sp.Sharding:
    """Return the case's sharding: which rank has which tokens."""
    make = getattr(sp.Sharding, str(case.layout))
    return cast("sp.Sharding", make(case.shape["seq"], case.ranks))


def widths(case: Case) -> tuple[int, int, int]:
    """Return the numbers of heads and of key/value heads, and the dim of a head."""
    return case.shape["heads"], case.shape["kv_heads"], case.shape["head_dim"]


def sent(case: Case, mesh: sp.Mesh) -> int | None:
    """Return the bytes that this rank sends in a step by `sp_core.cost`; None without a formula."""
    owned, mask = (sharding_of(case),) * 2, MASKS[str(case.mask)]
    around = mesh["ring" if case.scheme == HYBRID else AXIS]
    sizes = cost.Attention(
        *(*owned, mask, case.shape["batch"], *widths(case), dtype_of(case).itemsize),
        shared=case.transport == WINDOW and around.window is not None,
    )
    formula = getattr(cost, case.scheme, None)
    if formula is None:
        return None
    if case.scheme == HYBRID:
        groups = groups_of(case.mesh["ring"], case.mesh["ulysses"], ulysses_fastest=True)
        return bytes_of(formula(sizes, mesh["ring"].rank, mesh["ulysses"].rank, groups), case)
    return bytes_of(formula(sizes, mesh.rank), case)


def bytes_of(both: cost.Both, case: Case) -> int:
    """Return the bytes sent in a forward, plus those of the backward if the case has one."""
    return both[0].bytes_sent + (both[1].bytes_sent if case.direction == "both" else 0)


def flops(case: Case) -> int:
    """Return the floating point operations of one step over all ranks, a multiply-add as two."""
    seq, (heads, _, head_dim) = case.shape["seq"], widths(case)
    pairs = seq * (seq + 1) // 2 if MASKS[str(case.mask)].causal else seq**2
    forward = 4 * case.shape["batch"] * pairs * heads * head_dim
    return int(forward * (1 + BACKWARD_FLOPS)) if case.direction == "both" else forward


def normal(shape: tuple[int, ...], case: Case, mesh: sp.Mesh, seed: int) -> Tensor:
    """Draw normal numbers that require a gradient if the case has a backward."""
    random = torch.Generator(mesh.device).manual_seed(seed)
    x = torch.randn(shape, generator=random, device=mesh.device, dtype=dtype_of(case))
    return x.requires_grad_(case.direction == "both")
