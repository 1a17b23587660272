"""Describe contestants, and make those that are not ours: other libraries and one process."""

import functools
import importlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.contests.peers.table import DUO, MASKED, PEERS, SOLO
from benchmarks.sample import meet_asleep
from benchmarks.worker import Intracomm
from tests.conformance.adapters import deepspeed_ulysses, torch_ring
from tests.oracle.reference.dense import visible

WIDTH = 64
"""Keys of a sliding window, and mean tokens of a packed document; at most half the sequence."""

FLEX_BLOCK = 32
"""The block size of FlexAttention: of 32, 64 and 128 the quickest for both masks."""

MISSING = (ImportError, AttributeError, RuntimeError, OSError)
TORCH_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Around = Callable[[], AbstractContextManager[None]]
Maker = Callable[[], tuple[Attend, Around]]


@dataclass(frozen=True)
class Contestant:
    """Describe one implementation of the attention, and how it is timed.

    Args:
        name: the contestant's name, in parts separated by "/".
        attend: computes out from q, k and v of this rank; or a text on why it is not installed.
        layout: which tokens a rank has.
        ranks: how many ranks take part; with 1, rank 0 computes everything and the others sleep.
        heads_first: whether tensors lie in memory as (B, H, S, D), not (B, S, H, D).
        mask: the name of one of `masks`.
        backward: whether gradients are computed, too.
        threads: the torch threads of each rank.
        around: makes a context around forward and backward; opening and closing is not timed.
    """

    name: str
    attend: Attend | str
    layout: str = "contiguous"
    ranks: int = 1
    heads_first: bool = False
    mask: str = "causal"
    backward: bool = True
    threads: int = 1
    around: Around = nullcontext


def masks(seq: int) -> dict[str, dict[str, Any]]:
    """Return by name the arguments of each mask, for `Mask` and for the reference of the checks."""
    width = min(WIDTH, seq // 2)
    cuts = sorted(random.Random(seq).sample(range(1, seq), seq // width - 1))
    return {
        "causal": {"causal": True},
        "full": {},
        "window": {"causal": True, "window": width},
        "documents": {"documents": (0, *cuts, seq)},
    }


def plain(q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor | None = None) -> Tensor:
    """Compute attention of tensors (B, S, H, D) with torch: causal, or with the keys `seen`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
    return out.transpose(1, 2)


def processes(device: torch.device) -> Iterator[Contestant]:
    """Yield torch's attention in one process, with heads first, which is fastest, and strided.

    The strided tensors lie in memory as those of the schemes.
    """
    yield Contestant(SOLO, plain, heads_first=True)
    if device.type == "cpu":
        yield Contestant(DUO, plain, heads_first=True, threads=2)
    yield Contestant(f"{SOLO}/strided", plain)


def peers(world: Intracomm, device: torch.device) -> Iterator[Contestant]:
    """Yield torch's ring attention and DeepSpeed's Ulysses."""
    ways = ("ALL_GATHER", "ALL_TO_ALL")
    rings: list[Maker] = [functools.partial(make_torch_ring, way, device) for way in ways]
    for name, make in zip(PEERS, (*rings, make_deepspeed_ulysses), strict=True):
        attend, around = installed(world, make)
        layout = "zigzag" if make in rings else "contiguous"
        how: Any = {"heads_first": make in rings, "around": around}
        yield Contestant(name, attend, layout, world.size, **how)


def masked_peers(world: Intracomm, seq: int) -> Iterator[Contestant]:
    """Yield torch's attention with other masks, in one process of two threads."""
    makers = {"flex/2 threads": (make_flex, True), "nested/2 threads": (make_nested, False)}
    for form, (name, mask, backward) in MASKED.items():
        make, heads_first = makers[name]
        attend, _ = installed(world, functools.partial(make, seq, masks(seq)[mask]))
        how: Any = {"heads_first": heads_first, "mask": mask, "backward": backward}
        yield Contestant(f"{name}/{form}", attend, threads=2, **how)


def installed(world: Intracomm, make: Maker) -> tuple[Attend | str, Around]:
    """Call `make`. If it fails on a rank, return the reason on all ranks instead of a function."""
    made: tuple[Attend | str, Around]
    try:
        made = make()
    except (*MISSING, ValueError) as error:
        made = f"{type(error).__name__}: {error}", nullcontext
    meet_asleep(world)  # imports take seconds, and a rank that spins takes them from the other
    reasons: list[str] = world.allgather(made[0] if isinstance(made[0], str) else "")
    return next(filter(None, reasons), made[0]), made[1]


def make_torch_ring(rotation: str, device: torch.device) -> tuple[Attend, Around]:
    """Make torch's ring with load balancing; rank r of P has the tokens of chunks r and 2P-1-r.

    On a GPU the ring runs in torch's public `context_parallel`. That has no kernel for a CPU, so on
    a CPU the adapter `torch_ring` calls the same ring with torch's CPU kernel.

    Args:
        rotation: "ALL_GATHER", torch's default, or "ALL_TO_ALL".
        device: the device of the tokens.

    Returns:
        The attention function, and a function that makes the context in which to call it.

    Raises:
        ValueError: torch has no process group for tensors of such a device.
    """
    ring: Any = importlib.import_module(TORCH_RING)
    method = getattr(ring._RotateMethod, rotation)
    dist.get_default_backend_for_device(device)
    ranks = dist.get_world_size()
    mesh = None if device.type == "cpu" else init_device_mesh(device.type, (ranks,))

    @contextmanager
    def around() -> Iterator[None]:
        ring._cp_options.rotate_method = method
        with ExitStack() as stack:
            if mesh is not None:  # the context needs a tensor to shard
                given = {"buffers": [torch.zeros(2 * ranks, device=device)], "buffer_seq_dims": [0]}
                stack.enter_context(ring.context_parallel(mesh, **given))
            yield

    how: Any = {"layout": "zigzag", "causal": True, "softmax_scale": None}
    return plain if mesh else functools.partial(torch_ring.attend, **how), around


def make_deepspeed_ulysses() -> tuple[Attend, Around]:
    """Make DeepSpeed's DistributedAttention around torch's attention.

    Return the attention function, and a function that makes an empty context.

    Raises:
        ImportError: DeepSpeed, or something that it imports, is not installed.
    """
    deepspeed_ulysses.prepare(None, "")
    layer: Any = importlib.import_module("deepspeed.sequence.layer")
    module = layer.DistributedAttention(plain, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: cast("Tensor", module(q, k, v, 0)), nullcontext


def make_flex(seq: int, mask: Mapping[str, Any]) -> tuple[Attend, Around]:
    """Make torch's FlexAttention, compiled. It has no backward on a CPU, so only the forward runs.

    Args:
        seq: the number of tokens.
        mask: the arguments of a mask, as in `masks`.

    Returns:
        The attention function, and a function that makes an empty context.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()  # raises RuntimeError
    library: Any = importlib.import_module("torch.nn.attention.flex_attention")
    seen = visible(range(seq), range(seq), **mask)
    begin = seen.int().argmax(1)
    end = begin + seen.sum(1)
    blocks = library.create_block_mask(
        lambda _batch, _head, query, key: (begin[query] <= key) & (key < end[query]),
        *(None, None, seq, seq, "cpu", FLEX_BLOCK),
    )
    compiled: Any = torch.compile(library.flex_attention, fullgraph=True, dynamic=False)

    def attend(*qkv: Tensor) -> Tensor:
        heads_first = (x.detach().transpose(1, 2) for x in qkv)
        return cast("Tensor", compiled(*heads_first, block_mask=blocks).transpose(1, 2))

    return attend, nullcontext


def make_nested(seq: int, mask: Mapping[str, Any]) -> tuple[Attend, Around]:
    """Make torch's attention on a nested tensor, whose parts are the documents of `mask`.

    Return the attention function, and a function that makes an empty context.
    """
    bounds = torch.tensor(mask["documents"])

    def attend(*qkv: Tensor) -> Tensor:
        jagged = (torch.nested.nested_tensor_from_jagged(x[0], bounds) for x in qkv)
        q, k, v = (x.transpose(1, 2) for x in jagged)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()[None]

    return attend, nullcontext
