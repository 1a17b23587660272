"""Compute a column-parallel and then a row-parallel linear layer, on one process and on ranks.

This file imports torch alone, because it is also pasted into scripts. A problem is plain data.

Shape letters: B batch, S sequence, E model dim, F features between the layers, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def tensors(p: dict[str, Any]) -> dict[str, Tensor]:
    """Draw the input and the upstream gradient (B, S, E), and the parameters of both layers."""
    hidden, inner = p["hidden"], p["inner"]
    shapes: dict[str, Any] = dict.fromkeys(("x", "grad"), (p["batch"], p["seq_len"], hidden))
    shapes |= {"up.weight": (inner, hidden), "down.weight": (hidden, inner)}
    if p["bias"]:
        shapes |= {"up.bias": (inner,), "down.bias": (hidden,)}
    random, dtype = torch.Generator().manual_seed(p["seed"]), getattr(torch, p["dtype"])
    options: dict[str, Any] = {"generator": random, "dtype": torch.float64}
    return {name: torch.randn(shape, **options).to(dtype) for name, shape in shapes.items()}


def trained(p: dict[str, Any], name: str) -> bool:
    """Return whether a parameter gets a gradient."""
    return bool(name != p["frozen"])


def alone(p: dict[str, Any], of: Callable[[Tensor], Tensor] = torch.clone) -> dict[str, Tensor]:
    """Compute the output and all gradients on one process, in float64.

    With `of=torch.abs` each element is the sum of the absolute values of its terms.
    """
    given = {name: of(x.double()) for name, x in tensors(p).items()}
    grad = given.pop("grad")
    leaves = {name: x.requires_grad_() for name, x in given.items() if trained(p, name)}
    out = given["x"]
    for _ in range(p["times"]):
        out = F.linear(out, given["up.weight"], given.get("up.bias"))
        out = F.linear(out, given["down.weight"], given.get("down.bias"))
    found = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out.detach(), **{f"d {name}": x for name, x in zip(leaves, found, strict=True)}}


def part(p: dict[str, Any], name: str, whole: Tensor, rank: int) -> Tensor:
    """Return a rank's part of a result: its tokens, or its features of a parameter."""
    if name in ("out", "d x"):
        return whole[:, torch.tensor(p["shards"][rank])]
    mine = torch.arange(p["inner"]).tensor_split(len(p["shards"]))[rank]
    if name.startswith("d up"):
        return whole[mine]
    return whole[:, mine] if name == "d down.weight" else whole


def results(
    p: dict[str, Any],
    rank: int,
    make: Callable[..., Any],
    variant: str,
    comm: Any = None,
) -> dict[str, Tensor]:
    """Run a library's layers; return this rank's output and gradients, empty where one is missing.

    Args:
        p: the problem, as plain data.
        rank: this rank's number.
        make: a function from the whole parameters to a module with layers `up` and `down`.
        variant: the library's variant, passed to `make`.
        comm: the communicator of all ranks, passed to `make`.
    """
    whole = tensors(p)
    x, grad = (part(p, "out", whole.pop(name), rank).clone() for name in ("x", "grad"))
    pair = make(whole, variant=variant, comm=comm, shards=p["shards"])
    leaves = {"x": x.requires_grad_()}
    for name, parameter in pair.named_parameters():
        parameter.requires_grad_(trained(p, name))
        leaves |= {name: parameter} if trained(p, name) else {}
    out = x
    for _ in range(p["times"]):
        out = pair(out)
    if not p["gradients"]:
        return {"out": out.detach()}
    out.backward(grad)
    pair.finish()
    missing = torch.empty(0)
    grads = {f"d {name}": missing if x.grad is None else x.grad for name, x in leaves.items()}
    return {"out": out.detach(), **grads}
