"""Call torch's CUDA attention kernels: convert their arguments, and the shape of their lse.

The rest of the package calls `forward` and `backward` for one block of attention, and `sequences`
and `sequences_backward` for many blocks at once. `on_device` and `kept` compute a copy or a mask of
a tensor once, on any device. Shapes as in `sp_core.attention`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from sp_core.attention.merge import accumulation_dtype
from sp_core.scratch import used

# the memory-efficient kernel pads its lse to a multiple of this many queries
LSE_ALIGNMENT = 32
# the kernels read and write this many bytes at a time, at addresses that are multiples of it
LOAD_BYTES = 16
CUDNN, CUDNN_HEAD_DIM = SDPBackend.CUDNN_ATTENTION.value, 128

Triple = tuple[Tensor, Tensor, Tensor]
"""The gradients (dq, dk, dv)."""
SequenceLengths = tuple[tuple[int, ...], tuple[int, ...]]
"""For each sequence the number of queries; for each sequence the number of keys."""


@lru_cache(maxsize=64)
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, such as (8, 0) for an A100."""
    return torch.cuda.get_device_capability(device)


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """Return x on a device. A copy is kept as an attribute of x for later calls.

    The host waits for the device while it copies x. So indices and masks are copied only once.
    """
    return x if x.device == device else used(kept(x, device, lambda: x.to(device)))


def kept(x: Tensor, key: torch.device | torch.dtype, make: Callable[[], Tensor]) -> Tensor:
    """Return the result of `make`. The first call with this key keeps it as an attribute of x."""
    made: dict[torch.device | torch.dtype, Tensor] = vars(x).setdefault("kept", {})
    if key not in made:
        made[key] = make()
    return made[key]


def forward(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    allowed: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run a CUDA kernel on one block. Return out (B, H, Sq, D) and lse (B, H, Sq).

    Args:
        backend: "flash_cuda" (cuDNN's kernel runs if torch prefers it), or "efficient_cuda".
        q: (B, H, Sq, D).
        k, v: (B, K, Sk, D).
        causal: whether key j is visible to query i only if j <= i.
        allowed: bool (Sq, Sk) of visible pairs, for "efficient_cuda" only; None for all.
        scale: factor of q k^T.
    """
    aten = torch.ops.aten
    q, k, v = (aligned(x) for x in (q, k, v))
    if backend == "flash_cuda" and prefers_cudnn(q, k, v, causal, scale):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        lse = lse.view(q.shape[:3])
    elif backend == "flash_cuda":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    else:
        k, v = (repeated(t, q.shape[1]) for t in (k, v))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, added(allowed, q), True, 0.0, causal, scale=scale
        )
    return out, lse[..., : q.shape[2]]


def backward(
    backend: str,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    allowed: Tensor | None,
    scale: float,
) -> Triple:
    """Run the backward of a CUDA kernel. Return dq, dk and dv in the dtype of q.

    Args:
        backend: "flash_cuda" or "efficient_cuda".
        grad_out, out: (B, H, Sq, D).
        lse: (B, H, Sq).
        q, k, v, causal, allowed, scale: as in `forward`.
    """
    aten = torch.ops.aten
    grad_out, q, k, v, out = (aligned(x) for x in (grad_out, q, k, v, out))
    lengths, tensors = (q.shape[2], k.shape[2]), (grad_out, q, k, v, out)
    given: tuple[object, ...]
    if backend == "flash_cuda" and prefers_cudnn(q, k, v, causal, scale):
        given = (*tensors, lse[..., None].contiguous(), *_no_state(q), None, None, None, *lengths)
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            *given, 0.0, causal, scale=scale
        )
    elif backend == "flash_cuda":
        given = (*tensors, lse.contiguous(), None, None, *lengths)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            *given, 0.0, causal, *_flash_state(q), scale=scale
        )
    else:
        heads, (k, v) = k.shape[1], (repeated(t, q.shape[1]) for t in (k, v))
        given = (grad_out, q, k, v, added(allowed, q), tokens_first(out), padded_lse(lse))
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            *given, *_no_state(q), 0.0, [True, True, True, False], causal, scale=scale
        )
        dk, dv = (gathered(t, heads) for t in (dk, dv))
    return dq, dk, dv


def prefers_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> bool:
    """Return whether torch's `scaled_dot_product_attention` would run cuDNN's kernel on a block.

    torch does so on GPUs for which cuDNN has the faster kernel, such as an H200. False for heads of
    more than CUDNN_HEAD_DIM elements, which cuDNN's backward does not support, and if torch would
    run no kernel.

    Args:
        q, k, v, causal, scale: the block, which torch's flash kernel supports too.
    """
    if q.shape[3] > CUDNN_HEAD_DIM:
        return False
    gqa = q.shape[1] != k.shape[1]
    try:
        chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=gqa)
    except RuntimeError as error:  # the caller's `sdpa_kernel` leaves no kernel for this block
        if "No available kernel" not in str(error):
            raise
        return False
    return chosen == CUDNN


def _no_state(like: Tensor) -> Iterator[Tensor]:
    """Yield zeros for the random seed and offset, which only dropout would read."""
    return (like.new_zeros((), dtype=torch.int64) for _ in range(2))


def _flash_state(like: Tensor) -> Iterator[Tensor]:
    """Yield zeros for the random state that the flash backward takes, on the device of `like`.

    Only dropout would read them.
    """
    return (like.new_zeros(shape, dtype=torch.int64).to(torch.uint64) for shape in ((2,), ()))


def sequences(
    q: Tensor, k: Tensor, v: Tensor, lengths: SequenceLengths, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Run the flash kernel on many sequences at once. A query sees the keys of its own sequence.

    Args:
        q: (tokens, H, D), contiguous: all sequences of the first example of a batch one after the
            other, then those of the next example.
        k, v: (tokens, K, D), contiguous, in the same order.
        lengths: the number of queries of each sequence of one example; the number of keys of each.
        causal: whether key j of a sequence is visible to query i only if j <= i. Each sequence must
            then have as many keys as queries.
        scale: factor of q k^T.

    Returns:
        out (tokens, H, D) and lse (tokens, H).
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_ends(lengths, q), 0.0, causal, False, scale=scale
    )
    return out, lse.T


def sequences_backward(
    tensors: Sequence[Tensor], lse: Tensor, lengths: SequenceLengths, causal: bool, scale: float
) -> Triple:
    """Run the backward of `sequences`. Return dq, dk and dv in the shapes of q, k and v.

    Args:
        tensors: grad_out, q, k, v and out.
        lse: (tokens, H), as `sequences` returned it.
        lengths, causal, scale: as in `sequences`.
    """
    given = *tensors, lse.T.contiguous(), *_ends(lengths, lse)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *given, 0.0, causal, *_flash_state(lse), scale=scale
    )
    return dq, dk, dv


def _ends(lengths: SequenceLengths, like: Tensor) -> tuple[object, ...]:
    """Return the arguments that tell the flash kernel where the sequences of a batch end.

    Args:
        lengths: as in `sequences`, for one example.
        like: a tensor on the kernel's device, with a row for each query of all examples.

    Returns:
        The cumulative numbers of queries, from 0 on, int32; the same for keys; the greatest number
        of queries of a sequence; the greatest number of keys.
    """
    batch = len(like) // sum(lengths[0])
    ends = (_cumulative(each * batch) for each in lengths)
    return *(on_device(end, like.device) for end in ends), *map(max, lengths)


@lru_cache(maxsize=64)
def _cumulative(lengths: tuple[int, ...]) -> Tensor:
    """Return the cumulative sums of `lengths`, from 0 on, int32. Results are cached."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")


def aligned(x: Tensor) -> Tensor:
    """Return x (B, H, S, D), or a contiguous copy if the kernels cannot read x.

    They need a dense last dim, and every row at an address that is a multiple of LOAD_BYTES. torch
    does not check this (pytorch issue 183484). On other tensors the kernel fails, or makes CUDA
    unusable for the process.
    """
    strides = [
        stride for length, stride in zip(x.shape[:-1], x.stride(), strict=False) if length > 1
    ]
    rows = (x.data_ptr(), *(stride * x.itemsize for stride in strides))
    if x.stride(-1) == 1 and not any(place % LOAD_BYTES for place in rows):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def added(allowed: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the bias (B, H, Sq, Sk) that the efficient kernel adds to the scores for a bool mask.

    It is 0 for visible and -inf for hidden pairs. Rows have room for a multiple of LOAD_BYTES
    elements, so they begin at multiples of as many bytes. All heads share the memory. A row may
    begin with hidden keys, but must have a visible key, else its result is NaN. Return None if
    `allowed` is None.
    """
    if allowed is None:
        return None
    room = q.new_full((len(allowed), -(-allowed.shape[1] // LOAD_BYTES) * LOAD_BYTES), -torch.inf)
    bias = room[:, : allowed.shape[1]].masked_fill_(on_device(allowed, q.device), 0.0)
    return bias.expand(*q.shape[:2], *bias.shape)


def tokens_first(x: Tensor) -> Tensor:
    """Return x (B, H, S, D), laid out in memory as (B, S, H, D).

    The efficient backward assumes this layout of `out`.

    Source: `o_strideM` in torch's kernel_backward.h: the row stride is num_heads * head_dim,
    whatever the strides of `out` are.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def repeated(x: Tensor, num_heads: int) -> Tensor:
    """Repeat key/value heads, (B, K, S, D) to (B, H, S, D), for a kernel that needs K = H."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def gathered(dx: Tensor, num_kv_heads: int) -> Tensor:
    """Sum gradients over the query heads of each key/value head, (B, H, S, D) to (B, K, S, D).

    The sum is in float32 or wider. If K = H, dx is returned as it is.
    """
    if dx.shape[1] == num_kv_heads:
        return dx
    b, h, s, d = dx.shape
    return dx.reshape(b, num_kv_heads, h // num_kv_heads, s, d).sum(
        2, dtype=accumulation_dtype(dx.dtype)
    )


def padded_lse(lse: Tensor) -> Tensor:
    """Pad lse (B, H, Sq) with +inf to a multiple of LSE_ALIGNMENT queries.

    A query with lse = +inf has weight 0 for every key.
    """
    return pad(lse, (0, -lse.shape[-1] % LSE_ALIGNMENT), value=torch.inf).contiguous()
