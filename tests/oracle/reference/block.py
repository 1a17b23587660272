"""Compute a dense float64 transformer block, and its sensitivity to rounding.

Shape letters: B batch, S sequence, E model dim, F feed-forward dim, H heads, K key/value heads, D
head dim.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from .dense import Reference, distances, visible

# The size of the perturbations. Its square, and float64's round-off divided by it, are far below
# the measured effects.
EPSILON = 1e-7

Rounding = Callable[[Tensor], Tensor]
Outputs = tuple[Tensor | None, dict[str, Tensor]]


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, rounding: Rounding = lambda t: t
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last dim, (..., E)."""
    # the rounding of a mean far from 0 stays in the difference
    centred = rounding(x - rounding(x.mean(-1, keepdim=True)))
    return _normalized(centred, eps, rounding) * weight + bias


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, rounding: Rounding = lambda t: t
) -> Tensor:
    """Return x / sqrt(mean square + eps) * weight over the last dim, (..., E)."""
    return _normalized(x, eps, rounding) * weight


def _normalized(x: Tensor, eps: float, rounding: Rounding) -> Tensor:
    """Normalize step by step, because a gradient over few elements is made of roundings."""
    return rounding(x * rounding(1.0 / rounding((x**2).mean(-1, keepdim=True) + eps).sqrt()))


def rotate(x: Tensor, positions: Sequence[int] | Tensor, base: float | Sequence[float]) -> Tensor:
    """Rotate dims i and i + D/2 of x (B, S, H, D) by position times frequency i."""
    half = x.shape[-1] // 2
    p = torch.as_tensor(positions, dtype=torch.float64, device=x.device)
    pairs = torch.complex(x[..., :half], x[..., half:])
    frequencies = (
        [base ** (-i / half) for i in range(half)] if isinstance(base, int | float) else base
    )
    angles = torch.stack([p * frequency for frequency in frequencies], dim=-1)[:, None, :]
    turned = pairs * torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)
    return torch.cat((turned.real, turned.imag), dim=-1)


def feed_forward(
    x: Tensor, weights: Mapping[str, Tensor], rounding: Rounding = lambda t: t
) -> Tensor:
    """Return down(gelu(up(x))), or with a gate down(silu(gate(x)) * up(x)), (..., E)."""
    up = rounding(_linear(x, weights, "up"))
    if "gate.weight" in weights:
        inner = rounding(silu(rounding(_linear(x, weights, "gate")))) * up
    else:
        # 1 + erf cancels for negative up
        inner = up * (0.5 * (1 + rounding(torch.erf(up / math.sqrt(2)))))
    return _linear(rounding(inner), weights, "down")


def self_attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    num_heads: int,
    positions: Tensor,
    rope_base: float | Sequence[float] | None,
    seen: Tensor,
    softmax_scale: float | None = None,
    rounding: Rounding = lambda t: t,
    softcap: float | None = None,
    alibi: Sequence[float] | None = None,
) -> Tensor:
    """Attend to the keys that each query sees; return zero for a query that sees none.

    Args:
        x: (B, S, E).
        weights: q_proj, k_proj, v_proj, o_proj: each .weight and, if any, .bias; sinks (H,), if
            any.
        num_heads, positions, rope_base, softmax_scale, softcap, alibi, rounding: as in
            `transformer_block`.
        seen: bool (S, S), as `visible` gives it.
    """
    head_dim = weights["q_proj.weight"].shape[0] // num_heads
    q, k, v = (
        rounding(_linear(x, weights, name)).unflatten(-1, (-1, head_dim))
        for name in ("q_proj", "k_proj", "v_proj")
    )
    if rope_base is not None:
        q, k = (rounding(rotate(t, positions, rope_base)) for t in (q, k))
    k, v = (t.repeat_interleave(num_heads // t.shape[2], dim=2) for t in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * (
        head_dim**-0.5 if softmax_scale is None else softmax_scale
    )
    if softcap is not None:
        x = rounding(logits) / softcap
        t = rounding(x.tanh().detach())  # kernels compute 1 - t^2 from it, which cancels
        logits = softcap * (t + (1 - t**2) * (x - x.detach()))
    if alibi is not None:
        slopes = torch.tensor(alibi, dtype=x.dtype, device=x.device)[:, None, None]
        logits = rounding(logits) - rounding(slopes * distances(positions, positions).to(slopes))
    if "sinks" in weights:  # one more key, which every query sees and whose v is 0
        sinks = weights["sinks"][:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], -1)
        seen = torch.cat([seen, torch.ones_like(seen[:, :1])], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    e, total = _exponentials(_recomputed(rounding(logits), rounding), seen, rounding)
    # Divide after the sum over keys, as kernels do. They round each element of this sum and, in the
    # backward, a sum over D of its elements.
    out = rounding(torch.einsum("bhqk,bkhd->bqhd", e, v)) / total.transpose(1, 2)
    return _linear(rounding(out.flatten(2)), weights, "o_proj")


def transformer_block(
    x: Tensor,
    weights: Mapping[str, Tensor],
    *,
    num_heads: int,
    norm: str = "layer",
    eps: float | None = None,
    rope_base: float | Sequence[float] | None = None,
    positions: Sequence[int] | Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi: Sequence[float] | None = None,
    kept: Sequence[Tensor | float] = (1.0, 1.0),
    rounding: Rounding = lambda t: t,
) -> Tensor:
    """Return y + feed_forward(norm2(y)) with y = x + attention(norm1(x)).

    Args:
        x: (B, S, E), all tokens.
        weights: norm1, norm2: weight (E,) and for layer norm bias (E,); attention.q_proj (H D, E),
            k_proj and v_proj (K D, E), o_proj (E, H D); feed_forward.up and, if any, gate (F, E),
            down (E, F): each .weight and, if any, .bias.
        num_heads: H; K and D follow from the weights.
        norm: "layer" or "rms".
        eps: epsilon of the norms; 1e-5 for layer and 1e-6 for rms when None.
        rope_base: base of the rotary embedding, or its D/2 frequencies; none when None.
        positions: S global positions; 0 .. S - 1 when None.
        causal, window, documents: as in `visible`.
        softmax_scale: 1 / sqrt(D) when None.
        softcap: the logits are softcap tanh(s / softcap) of the scaled scores s; s when None.
        alibi: H slopes, by which the logits of each head fall with the distance; none when None.
        kept: factors of the outputs of attention and feed-forward, for dropout: 0 or 1 / (1 - p).
        rounding: applied to every intermediate result; `sensitivity` perturbs there.

    Returns:
        (B, S, E) in the dtype that x and the weights are promoted to: float64 for the reference
        proper.
    """
    positions = range(x.shape[1]) if positions is None else positions
    positions = torch.as_tensor(positions, dtype=torch.int64)
    seen = visible(positions, positions, causal=causal, window=window, documents=documents).to(
        x.device
    )
    normed = rounding(_norm(rounding(x), weights, "norm1", norm, eps, rounding))
    attended = self_attention(
        normed,
        _under(weights, "attention"),
        *(num_heads, positions, rope_base, seen, softmax_scale, rounding, softcap, alibi),
    )
    x = rounding(x + rounding(attended) * kept[0])
    normed = rounding(_norm(x, weights, "norm2", norm, eps, rounding))
    return rounding(
        x + rounding(feed_forward(normed, _under(weights, "feed_forward"), rounding)) * kept[1]
    )


def sensitivity(
    function: Callable[[Rounding, dict[str, Tensor]], Outputs],
    inputs: Mapping[str, Tensor],
    samples: int = 8,
) -> Reference:
    """Measure how far outputs and gradients move when inputs and intermediate results do.

    Every element of every input is multiplied by 1 + EPSILON times a normal random number. So is
    every tensor that the function passes through `rounding`, and its gradient on the way back. The
    scale is the root mean square of the movement over EPSILON, plus its mean along the last dim:
    few samples may all miss an element.

    Args:
        function: takes `rounding` and the inputs in float64. It returns a number, or None, and
            outputs by name. The gradient of the number with respect to each input is added to the
            outputs under the input's name.
        inputs: the inputs by name.
        samples: number of perturbed evaluations.

    Source: Vignes, "A stochastic arithmetic for reliable scientific computation", 1993.
    """

    def results(rounding: Rounding) -> dict[str, Tensor]:
        leaves = {
            name: rounding(x.detach().double()).detach().requires_grad_()
            for name, x in inputs.items()
        }
        total, outputs = function(rounding, leaves)
        found = {name: x.detach() for name, x in outputs.items()}
        if total is not None:
            grads = torch.autograd.grad(
                total, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
            found |= zip(leaves, grads, strict=True)
        return found

    generator = torch.Generator().manual_seed(0)
    values = results(lambda t: t)
    squares = {name: torch.zeros_like(value) for name, value in values.items()}
    for _ in range(samples):
        for name, moved in results(lambda t: _perturb(t, generator)).items():
            squares[name] += ((moved - values[name]) / EPSILON) ** 2
    sizes = {name: (squares[name] / samples).sqrt() + values[name].abs() for name in values}
    return Reference(values, {n: size + size.mean(-1, keepdim=True) for n, size in sizes.items()})


def _perturb(x: Tensor, generator: torch.Generator) -> Tensor:
    """Multiply each element of x by a random factor near 1, and its gradient by another one."""

    def factor() -> Tensor:
        drawn = torch.randn(x.shape, generator=generator)  # in float32, which is quicker to draw
        return drawn.double().mul_(EPSILON).add_(1).to(x)

    moved = x.detach() * factor()
    return moved + (x - x.detach()) * factor() if x.requires_grad else moved


def _recomputed(logits: Tensor, rounding: Rounding) -> Tensor:
    """Return the logits with the gradient of a kernel that computes them again in backward.

    The backward takes p = exp(logits - lse) with the forward's lse, but rounds the logits anew, by
    u |logit| for a round-off u. This moves p (dp - rowsum(p dp)) by as much: these terms then no
    longer add up to 0.

    Source: Dao, "FlashAttention-2", 2023, algorithm 2.
    """
    before = logits.detach()
    return before + (logits - before) * torch.exp(rounding(before) - before)


def _exponentials(logits: Tensor, seen: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Return numerators and sums of the softmax; their roundings remain in a saturated gradient."""
    # A row that sees nothing keeps finite logits and is zeroed at the end.
    hidden = ~seen & seen.any(-1, keepdim=True)
    logits = logits.masked_fill(hidden, -math.inf)
    greatest = logits.detach().amax(-1, keepdim=True)
    e = rounding(torch.exp(logits - greatest))
    total = e.sum(-1, keepdim=True)
    # Kernels keep the log-sum-exp: its rounding moves all probabilities of a row alike.
    lse = greatest + total.detach().log()
    return e * seen, rounding(total) * torch.exp(rounding(lse) - lse)


def _norm(
    x: Tensor,
    weights: Mapping[str, Tensor],
    name: str,
    kind: str,
    eps: float | None,
    rounding: Rounding,
) -> Tensor:
    """Apply the norm of that name and kind."""
    if kind == "rms":
        return rms_norm(x, weights[f"{name}.weight"], 1e-6 if eps is None else eps, rounding)
    return layer_norm(
        x,
        weights[f"{name}.weight"],
        weights[f"{name}.bias"],
        1e-5 if eps is None else eps,
        rounding,
    )


def _linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """Return x W^T + b."""
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def _under(weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the weights whose names begin with `name.`, without this prefix."""
    return {
        key.removeprefix(f"{name}."): value
        for key, value in weights.items()
        if key.startswith(f"{name}.")
    }
