"""Transformer layers for sequences that are split over ranks, with all weights on every rank.

Each rank calls a layer with the tokens that it holds, its shard. A `Sharding` says which rank holds
which tokens. Only attention exchanges activations, by a scheme: a function that computes attention
over the tokens of all ranks. All ranks call the same layers in the same order: every forward
checks that the ranks' calls agree, and every backward sums the gradients of the weights.

Shapes: B batch, S sequence, E model dim, F feed-forward dim, H heads, K key/value heads, D head
dim, P ranks; S/P stands for this rank's tokens, also if the ranks have unequal numbers.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_core import arguments
from sp_core.communicator import Communicator
from sp_core.errors import ShapeError
from sp_core.mask import Mask
from sp_core.nn.dropout import dropout
from sp_core.nn.memory import tiled
from sp_core.nn.replicated import ReplicatedLayer, check_summed, is_called
from sp_core.nn.rope import Rope, check_rope, rotation
from sp_core.schemes import allgather_kv_attention
from sp_core.sharding import Sharding

Device = torch.device | None
Dtype = torch.dtype | None
Function = Callable[[Tensor], Tensor]

AttentionFunction = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""A function that computes attention over the tokens of all ranks, such as `ring_attention`: from q
(B, S/P, H, D), k and v (B, S/P, K, D) to (B, S/P, H, D). Its keywords are comm, sharding and mask,
and those of softcap, sinks and alibi that a layer uses."""


def attended(
    projected: Iterable[Tensor],
    head_dim: int,
    rotate: Function | None,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Split projected q, k and v into heads, rotate q and k, and compute attention.

    Args:
        projected: q (B, S, H*D), k and v (B, S, K*D), where S is the number of this rank's tokens.
        head_dim: D, the elements of a head.
        rotate: the rotary embedding of q and k, which keeps their shapes; None for none.
        attend: attention from q (B, S, H, D), k and v (B, S, K, D) to (B, S, H, D).

    Returns:
        (B, S, H*D).
    """
    q, k, v = (y.unflatten(2, (-1, head_dim)) for y in projected)
    if rotate is not None:
        q, k = rotate(q), rotate(k)
    return attend(q, k, v).flatten(2)


def pre_norm(
    x: Tensor, norm1: Function, attention: Function, norm2: Function, feed_forward: Function
) -> Tensor:
    """Return y + feed_forward(norm2(y)), where y = x + attention(norm1(x)).

    Source: Xiong et al. 2020, On Layer Normalization in the Transformer Architecture,
    arXiv:2002.04745, figure 1 b.
    """
    x = x + attention(norm1(x))
    return x + feed_forward(norm2(x))


class _Norm(ReplicatedLayer):
    """The base class of the norms, with a weight (E,) that starts at 1."""

    def __init__(
        self,
        hidden: int,
        *,
        comm: Communicator,
        eps: float = 1e-6,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(hidden, comm)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))


class RMSNorm(_Norm):
    """Divide the E features of each token by their root mean square, and multiply by a weight.

    Args:
        hidden: E, the features of a token; below 1 raises a ValueError.
        comm: the ranks, each of which holds the whole weight.
        eps: added to the mean square.
        device, dtype: those of the weight.

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization, arXiv:1910.07467,
    equation 4.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., E). Every rank calls this; the method `weights` says what is sent."""
        weight = self.weights(x)["weight"]
        return F.rms_norm(x, weight.shape, weight, self.eps)


class LayerNorm(_Norm):
    """Normalise the E features of each token by their mean and variance, then scale and shift.

    Args:
        hidden: E, the features of a token; below 1 raises a ValueError.
        comm: the ranks, each of which holds the whole weight and bias.
        eps: added to the variance.
        device, dtype: those of the weights.

    Source: Ba et al. 2016, Layer Normalization, arXiv:1607.06450, equation 4.
    """

    def __init__(
        self,
        hidden: int,
        *,
        comm: Communicator,
        eps: float = 1e-5,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(hidden, comm=comm, eps=eps, device=device, dtype=dtype)
        self.bias = nn.Parameter(torch.zeros(hidden, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., E). Every rank calls this; the method `weights` says what is sent."""
        held = self.weights(x)
        return F.layer_norm(x, held["weight"].shape, held["weight"], held.get("bias"), self.eps)


class SelfAttention(ReplicatedLayer):
    """Multi-head self-attention over a sequence that is split over the ranks.

    Every rank holds the weights q_proj, k_proj, v_proj and o_proj whole.

    Args:
        hidden: E, the features of a token.
        num_heads: H, the query heads.
        num_kv_heads: K, the key/value heads, a divisor of H; H if not given.
        head_dim: D, the elements of a head; E/H if not given.
        comm: the ranks that share the sequence.
        attention: the scheme, a function that computes attention over the tokens of all ranks;
            `functools.partial(hybrid_attention, mesh=mesh)` for two axes of a mesh.
        rope: rotary embedding of queries and keys by global position; none if not given.
        bias: whether the projections have a bias.
        softcap: bound of the logits, passed to the scheme; none if not given.
        sinks: learn one logit per head that joins every softmax as a key without a value; the
            parameter `sinks` (H,) starts at 0, and may be changed to another floating dtype.
        alibi: H slopes, passed to the scheme; a logit falls by the slope of its head for each
            position between query and key. None if not given.
        device, dtype: those of the weights.

    Raises:
        ShapeError: num_heads is no multiple of num_kv_heads, or, without head_dim, hidden is no
            multiple of num_heads; or rope has another head_dim.
        TypeError, ValueError: another type, or a number below 1; of softcap and alibi in `forward`.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        *,
        comm: Communicator,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        attention: AttentionFunction = allgather_kv_attention,
        rope: Rope | None = None,
        bias: bool = True,
        softcap: float | None = None,
        sinks: bool = False,
        alibi: Sequence[float] | Tensor | None = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(hidden, comm)
        arguments.check(attention=attention, rope=rope)
        arguments.check_positive(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        hidden, num_heads, head_dim = map(arguments.plain, (hidden, num_heads, head_dim))
        terms = {"softcap": softcap, "alibi": alibi}
        self.terms = {name: value for name, value in terms.items() if value is not None}
        if sinks:
            self.sinks = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))
        num_kv_heads = arguments.plain(num_kv_heads) or num_heads
        if num_heads % num_kv_heads or (head_dim is None and hidden % num_heads):
            raise ShapeError(
                f"hidden={hidden}, num_heads={num_heads}, num_kv_heads={num_kv_heads}: num_heads "
                "must be a multiple of num_kv_heads, and divide hidden unless head_dim is given."
            )
        self.head_dim, self.attention, self.rope = head_dim or hidden // num_heads, attention, rope
        check_rope(rope, self.head_dim)
        width, kv_width = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, width, bias, device, dtype)
        self.k_proj = nn.Linear(hidden, kv_width, bias, device, dtype)
        self.v_proj = nn.Linear(hidden, kv_width, bias, device, dtype)
        self.o_proj = nn.Linear(width, hidden, bias, device, dtype)

    def forward(self, x: Tensor, *, sharding: Sharding, mask: Mask | None = None) -> Tensor:
        """Attend from this rank's tokens to those of all ranks, and return (B, S/P, E).

        Args:
            x: (B, S/P, E), the tokens in the order of `sharding.positions(comm.rank)`.
            sharding: which rank holds which tokens; equal on all ranks.
            mask: which query sees which key; None if every query sees every key.

        Communication:
            One agreement (32-byte all-reduce), then the messages of the scheme. Backward the
            messages of the scheme, one agreement, and one all-reduce of this layer's gradients.

        Raises:
            ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in `weights`
                and the scheme, on every rank.
        """
        weights = self.weights(x, sharding)
        projected = (self.linear(name, x, weights) for name in ("q_proj", "k_proj", "v_proj"))
        places = sharding.positions(self.comm.rank)
        rotate = None if self.rope is None else rotation(self.rope, places, x)
        terms = self.terms | ({"sinks": weights["sinks"]} if "sinks" in weights else {})
        attend: Any = partial(self.attention, comm=self.comm, sharding=sharding, mask=mask, **terms)
        out = attended(projected, self.head_dim, rotate, attend)
        return self.linear("o_proj", out, weights)


class FeedForward(ReplicatedLayer):
    """A feed-forward layer: gelu(x W_up) W_down, or with a third weight SwiGLU.

    Args:
        hidden: E, the features of a token.
        ffn_hidden: F, the features between the linear layers; 4 E if not given.
        comm: the ranks, each of which holds the weights whole.
        gated: whether to use SwiGLU, silu(x W_gate) * (x W_up), in place of gelu(x W_up).
        bias: whether the linear layers have a bias.
        chunk: how many tokens to compute at a time, at least 1; None for all. Of several chunks,
            backward computes each again, so the F features of only one exist at a time. If a
            replaced sub-layer has buffers, all tokens are computed at once.
        device, dtype: those of the weights.

    Raises:
        TypeError, ValueError: an argument is of another type, or a number is below 1.

    Source: Shazeer 2020, GLU Variants Improve Transformer, arXiv:2002.05202, equations 1 and 6.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int | None = None,
        *,
        comm: Communicator,
        gated: bool = False,
        bias: bool = True,
        chunk: int | None = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(hidden, comm)
        arguments.check_positive(ffn_hidden=ffn_hidden, chunk=chunk)
        hidden, ffn_hidden = self.hidden, arguments.plain(ffn_hidden) or 4 * self.hidden
        self.gated, self.chunk = gated, arguments.plain(chunk)
        self.up = nn.Linear(hidden, ffn_hidden, bias, device, dtype)
        if gated:
            self.gate = nn.Linear(hidden, ffn_hidden, bias, device, dtype)
        self.down = nn.Linear(ffn_hidden, hidden, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x (..., E). Every rank calls this; the method `weights` says what is sent."""
        weights = self.weights(x)

        def transform(x: Tensor) -> Tensor:
            up = self.linear("up", x, weights)
            inner = F.silu(self.linear("gate", x, weights)) * up if self.gated else F.gelu(up)
            return self.linear("down", inner, weights)

        random = any(map(is_called, self.children()))  # a replaced sub-layer may have dropout
        if random and [*self.buffers()]:  # ranks with more chunks would change them more often
            return transform(x)
        chunks = [x] if self.chunk is None else x.reshape(-1, self.hidden).split(self.chunk)
        return tiled(transform, chunks, dim=0, reads=weights.values(), random=random).view(x.shape)


class TransformerBlock(nn.Module):
    """A pre-norm transformer block over a sequence that is split over the ranks.

    The result is y + feed_forward(norm2(y)), where y = x + attention(norm1(x)).

    Args:
        hidden: E, the features of a token.
        num_heads, num_kv_heads, head_dim, attention, rope, softcap, sinks, alibi: as in
            `SelfAttention`.
        ffn_hidden, gated, chunk: as in `FeedForward`.
        comm: the ranks that share the sequence; each holds the weights whole.
        norm: "layer" for `LayerNorm` or "rms" for `RMSNorm`.
        mask: which query sees which key in calls without `mask`; None if all see all.
        bias: whether the linear layers have a bias.
        dropout: probability, in [0, 1), of dropping an element of the outputs of attention and
            feed-forward, in training mode.
        device, dtype: those of the weights.

    Raises:
        ShapeError, TypeError, ValueError: as in the layers; `norm` is neither "layer" nor "rms".
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        *,
        comm: Communicator,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn_hidden: int | None = None,
        gated: bool = False,
        norm: str = "layer",
        attention: AttentionFunction = allgather_kv_attention,
        mask: Mask | None = None,
        rope: Rope | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        softcap: float | None = None,
        sinks: bool = False,
        alibi: Sequence[float] | Tensor | None = None,
        chunk: int | None = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        arguments.check(dropout=dropout)
        if norm not in ("layer", "rms"):
            raise ValueError(f"norm={norm!r} was given; pass 'layer' or 'rms'.")
        make_norm = LayerNorm if norm == "layer" else RMSNorm
        self.mask, self.dropout, self.comm = mask, dropout, comm
        held: Any = {"comm": comm, "device": device, "dtype": dtype}
        heads: Any = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "rope": rope}
        heads |= {"softcap": softcap, "sinks": sinks, "alibi": alibi, "attention": attention}
        self.norm1 = make_norm(hidden, **held)
        self.attention = SelfAttention(hidden, num_heads, bias=bias, **heads, **held)
        self.norm2 = make_norm(hidden, **held)
        held |= {"gated": gated, "bias": bias, "chunk": chunk}
        self.feed_forward = FeedForward(hidden, ffn_hidden, **held)

    def forward(
        self, x: Tensor, *, sharding: Sharding, mask: Mask | None = None, seed: int | None = None
    ) -> Tensor:
        """Apply the block to this rank's tokens, and return (B, S/P, E).

        Args:
            x, sharding: (B, S/P, E), and which rank holds which tokens; as in `SelfAttention`.
            mask: which query sees which key; None takes the mask of the constructor.
            seed: needed and read only in training mode with dropout; equal on the ranks of `comm`,
                and 0 <= seed < 2^61. Pass a different one to each block, training step, micro-batch
                and replica.

        Communication:
            Four agreements (32-byte all-reduces), for two norms, attention and feed-forward; with
            dropout one more. The messages of the attention scheme. Backward the messages of the
            scheme, and for each of the four one agreement and one all-reduce of gradients.

        Raises:
            ValueError, TypeError, CollectiveMismatch: on every rank: dropout with no seed, a wrong
                one or different ones; or a trainable part that does not sum over `comm`.
            ShapeError, DtypeError, DeviceError, RankError: as in `SelfAttention.forward`.
        """

        def call() -> str:
            arguments.check(seed=0 if seed is None else seed)
            if seed is None or not 0 <= seed < 2**61:
                raise ValueError(
                    f"{seed=} was given; pass a number in [0, 2^61), equal on the ranks of `comm`, "
                    "because the block has dropout and is in training mode."
                )
            return f"a block with dropout={self.dropout}, seed={seed}"

        check_summed(self, self.comm, "norm1", "attention", "norm2", "feed_forward")
        if p := self.dropout if self.training else 0.0:
            self.comm.agree_on(call)
        mask = self.mask if mask is None else mask

        def drop(y: Tensor, place: int) -> Tensor:
            positions = sharding.positions(self.comm.rank)
            return dropout(y, p, seed=2 * int(seed or 0) + place, positions=positions) if p else y

        return pre_norm(
            x,
            self.norm1,
            lambda y: drop(self.attention(y, sharding=sharding, mask=mask), 0),
            self.norm2,
            lambda y: drop(self.feed_forward(y), 1),
        )
