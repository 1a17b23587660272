"""A transformer block under every scheme, and Megatron's pair of parallel linear layers; forward and with the backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import bench_schemes
from benchmarks.bench_schemes import DIRECTIONS, HYBRID, MASKS
from benchmarks.harness.case import AXIS, Case, Training, Work
from benchmarks.harness.phases import Phases
from sp_core import cost
from sp_core.mesh import Mesh
from sp_core.nn.layers import TransformerBlock
from sp_core.nn.parallel import ColumnParallelLinear, RowParallelLinear
from sp_core.schemes import SCHEMES
from sp_core.transport import NAMES

SHAPE = {"batch": 1, "seq": 1024, "hidden": 256, "heads": 8, "kv_heads": 8, "head_dim": 32, "ffn": 1024}
LAYOUT, MASK = "zigzag", "causal"
PAIR = "tp_sp"
QUICK = {("allgather_kv", "forward"), (PAIR, "forward")}
SEED = 0


def cases(ranks: int, device: str = "cpu", shape: dict[str, int] = SHAPE) -> list[Case]:
    """All cases on that number of ranks."""
    return [
        Case(
            "layers",
            scheme,
            mesh,
            shape,
            NAMES[device][0],
            direction=direction,
            layout=LAYOUT,
            mask=None if scheme == PAIR else MASK,
            detail="feed_forward" if scheme == PAIR else "block",
            quick=(scheme, direction) in QUICK,
        )
        for scheme in (*SCHEMES, HYBRID, PAIR)
        if (mesh := bench_schemes.mesh_of(scheme, ranks)) is not None
        for direction in DIRECTIONS
    ]


def build(case: Case, mesh: Mesh, sync: Callable[[], None]) -> Work:
    """This rank's part in one layer."""
    comms = bench_schemes.communicators(case, mesh)
    phases = Phases(comms, sync)
    sharding = bench_schemes.sharding_of(case)
    random = torch.Generator(mesh.device).manual_seed(mesh.rank)
    shape = (case.shape["batch"], sharding.local_len(mesh.rank), case.shape["hidden"])
    x = torch.randn(shape, generator=random, device=mesh.device, dtype=case.torch_dtype).requires_grad_(case.direction == "both")
    torch.manual_seed(SEED)  # the same weights on every rank
    make = _pair if case.scheme == PAIR else _block
    layer, forward, sent, flops = make(case, mesh, phases)
    leaves = (x, *layer.parameters())
    return Work(
        Training(case.direction, lambda: forward(x), leaves, phases),
        comms,
        leaves,
        sent=sent,
        flops=flops * (3 if case.direction == "both" else 1) + _attention_flops(case),
        tokens=case.shape["batch"] * case.shape["seq"],
        phases=phases,
    )


def bench_layer(parallel_benchmark: Callable[..., None], case: Case) -> None:
    """One layer."""
    parallel_benchmark(case, build)


Made = tuple[nn.Module, Callable[[Tensor], Tensor], int | None, int]
"""The layer, its forward, bytes that this rank sends, and flops of the linear layers' forward over all ranks."""


def _block(case: Case, mesh: Mesh, phases: Phases) -> Made:
    shape = case.shape
    sharding = bench_schemes.sharding_of(case)
    axes = tuple(case.mesh)
    block = TransformerBlock(
        shape["hidden"],
        shape["heads"],
        num_kv_heads=shape["kv_heads"],
        ffn_hidden=shape["ffn"],
        comm=mesh[axes if len(axes) > 1 else axes[0]],
        attention=partial(_attend, bench_schemes.attention_of(case, mesh), phases),
        mask=MASKS[str(case.mask)],
        device=mesh.device,
        dtype=case.torch_dtype,
    )
    _note(block.attention, "qkv", phases)
    _note(block.feed_forward, "mlp", phases)
    sent = bench_schemes.sent(case, mesh)
    if sent is not None and case.direction == "both" and mesh.size > 1:
        sent += sum(parameter.nbytes for parameter in block.parameters())  # an all-reduce of all gradients
    widths = shape["hidden"] + shape["kv_heads"] * shape["head_dim"] + shape["ffn"]
    forward = partial(_call, block, sharding=sharding)
    return block, forward, sent, 4 * shape["batch"] * shape["seq"] * shape["hidden"] * widths


def _pair(case: Case, mesh: Mesh, phases: Phases) -> Made:
    comm, sharding = mesh[AXIS], bench_schemes.sharding_of(case)
    hidden, ffn, batch = case.shape["hidden"], case.shape["ffn"], case.shape["batch"]
    up, down = (nn.Linear(a, b, bias=False, device=mesh.device, dtype=case.torch_dtype) for a, b in ((hidden, ffn), (ffn, hidden)))
    pair = nn.Sequential(
        ColumnParallelLinear.from_linear(up, comm=comm, sharding=sharding),
        RowParallelLinear.from_linear(down, comm=comm, sharding=sharding),
    )
    _note(pair, "mlp", phases)
    both = cost.tp_sp(sharding, mesh.rank, batch, hidden, case.torch_dtype.itemsize)
    sent = both[0].bytes_sent + (both[1].bytes_sent if case.direction == "both" else 0)
    return pair, partial(_call, pair), sent, 4 * batch * case.shape["seq"] * hidden * ffn


def _attention_flops(case: Case) -> int:
    return 0 if case.scheme == PAIR else bench_schemes.flops(case)


def _attend(call: Callable[..., Any], phases: Phases, *tensors: Tensor, comm: object, **arguments: Any) -> Any:
    with phases("attention"):
        return call(*tensors, **arguments)


def _call(layer: nn.Module, x: Tensor, **arguments: Any) -> Tensor:
    out: Tensor = layer(x, **arguments)
    return out


def _note(layer: nn.Module, name: str, phases: Phases) -> None:
    """Note the layer's forward as a phase."""
    forward = layer.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        with phases(name):
            return forward(*args, **kwargs)

    object.__setattr__(layer, "forward", noted)
