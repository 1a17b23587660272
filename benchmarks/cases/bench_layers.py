"""Time a transformer block under every scheme, and Megatron's pair of parallel linear layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sp_core as sp
from benchmarks.cases import bench_schemes
from benchmarks.cases.case import Named, Phases, Work, dtype_of, training
from benchmarks.cases.setting import HYBRID, mesh_of
from benchmarks.records import AXIS, Case, make_case
from sp_core import cost
from sp_core.schemes import SCHEMES
from sp_core.transport import NAMES

SHAPE = {
    "batch": 1,
    "seq": 1024,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 32,
    "ffn": 1024,
}
LAYOUT, MASK = "zigzag", "causal"
PAIR = "tp_sp"
QUICK = {("allgather_kv", "forward"), (PAIR, "forward")}
Made = tuple[nn.Module, Callable[[Tensor], Tensor], int | None]
"""The layer, its forward, and the bytes that this rank sends in a step; None without a formula."""


def cases(ranks: int, device: str = "cpu", shape: dict[str, int] = SHAPE) -> list[Case]:
    """Return all cases for a number of ranks and a kind of device."""
    return [
        make_case(
            "layers",
            scheme,
            mesh,
            shape,
            NAMES[device][0],
            direction=direction,
            layout=LAYOUT,
            mask=None if scheme == PAIR else MASK,
            detail="feed_forward" if scheme == PAIR else "block",
        )
        for scheme in (*SCHEMES, HYBRID, PAIR)
        if (mesh := mesh_of(scheme, ranks)) is not None
        for direction in bench_schemes.DIRECTIONS
    ]


def quick(case: Case) -> bool:
    """Return whether a case is part of the small selection."""
    return (case.scheme, case.direction) in QUICK


def build(case: Case, mesh: sp.Mesh, sync: Callable[[], None]) -> Work:
    """Return this rank's work in one layer."""
    phases = Phases(bench_schemes.communicators(case, mesh), sync)
    sharding = bench_schemes.sharding_of(case)
    shape = (case.shape["batch"], sharding.local_len(mesh.rank), case.shape["hidden"])
    x = bench_schemes.normal(shape, case, mesh, mesh.rank)
    torch.manual_seed(0)  # the same weights on every rank
    made = (_pair if case.scheme == PAIR else block)(case, mesh, phases)
    return work_of(case, phases, made, x)


def work_of(case: Case, phases: Phases, made: Made, x: Tensor) -> Work:
    """Return the work of a layer on this rank's tokens."""
    layer, forward, sent = made
    leaves = (x.requires_grad_(case.direction == "both"), *layer.parameters())
    return Work(
        training(case.direction, lambda: forward(x), leaves, phases),
        phases,
        leaves,
        sent=sent,
        flops=flops(case),
        tokens=case.shape["batch"] * case.shape["seq"],
    )


def flops(case: Case) -> int:
    """Return the floating point operations of one step over all ranks, a multiply-add as two."""
    shape, widths = case.shape, case.shape["ffn"]
    passes = 3 if case.direction == "both" else 1
    if case.scheme != PAIR:
        widths += shape["hidden"] + shape["kv_heads"] * shape["head_dim"]
    linear = 4 * shape["batch"] * shape["seq"] * shape["hidden"] * widths * passes
    return linear + (0 if case.scheme == PAIR else bench_schemes.flops(case))


def block(case: Case, mesh: sp.Mesh, phases: Named) -> Made:
    """Return a transformer block with the case's attention, its forward and the bytes it sends."""
    shape, axes = case.shape, tuple(case.mesh)
    sharding, call = bench_schemes.sharding_of(case), bench_schemes.attention_of(case, mesh)

    def attend(*tensors: Tensor, comm: object, **arguments: Any) -> Any:
        with phases("attention"):
            return call(*tensors, **arguments)

    made = sp.TransformerBlock(
        shape["hidden"],
        shape["heads"],
        num_kv_heads=shape["kv_heads"],
        ffn_hidden=shape["ffn"],
        comm=mesh[axes if len(axes) > 1 else axes[0]],
        attention=attend,
        mask=bench_schemes.MASKS[str(case.mask)],
        device=mesh.device,
        dtype=dtype_of(case),
    )
    _note(made.attention, "qkv", phases)
    _note(made.feed_forward, "mlp", phases)
    sent = bench_schemes.sent(case, mesh)
    if sent is not None and case.direction == "both" and mesh.size > 1:
        sent += sum(x.nbytes for x in made.parameters())  # an all-reduce of all gradients
    return made, lambda x: made(x, sharding=sharding), sent


def _pair(case: Case, mesh: sp.Mesh, phases: Named) -> Made:
    comm, sharding = mesh[AXIS], bench_schemes.sharding_of(case)
    hidden, ffn, batch = case.shape["hidden"], case.shape["ffn"], case.shape["batch"]
    plain: Any = {"bias": False, "device": mesh.device, "dtype": dtype_of(case)}
    up, down = nn.Linear(hidden, ffn, **plain), nn.Linear(ffn, hidden, **plain)
    pair = nn.Sequential(
        sp.ColumnParallelLinear.from_linear(up, comm=comm, sharding=sharding),
        sp.RowParallelLinear.from_linear(down, comm=comm, sharding=sharding),
    )
    _note(pair, "mlp", phases)
    both = cost.tp_sp(sharding, mesh.rank, batch, hidden, dtype_of(case).itemsize)
    return pair, pair, bench_schemes.bytes_of(both, case)


def _note(layer: nn.Module, name: str, phases: Named) -> None:
    """Mark the layer's forward as the phase `name`."""
    forward = layer.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        with phases(name):
            return forward(*args, **kwargs)

    object.__setattr__(layer, "forward", noted)
