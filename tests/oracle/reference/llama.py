"""Compute a dense float64 LLaMA from weights with the names of a Hugging Face checkpoint.

Shape letters: B batch, S sequence, E model dim, F feed-forward dim, H heads, K key/value heads, D
head dim, V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .block import Rounding, rms_norm, transformer_block

_PARTS = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    **{f"attention.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"feed_forward.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def llama(
    tokens: Tensor,
    weights: Mapping[str, Tensor],
    *,
    num_heads: int,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    eps: float = 1e-6,
    rounding: Rounding = lambda t: t,
    **seen: Any,
) -> Tensor:
    """Return the logits of every next token of whole sequences, for autograd to differentiate.

    Args:
        tokens: int64 (B, S).
        weights: model.embed_tokens (V, E), model.norm (E,), lm_head (V, E), without which the head
            is the embedding, and for layer i model.layers.i.*, each .weight.
        num_heads: H; K and D follow from the weights.
        rope_theta, rope_scaling: theta and scaling of `llama_frequencies`.
        eps: epsilon of the norms.
        rounding: as in `transformer_block`.
        seen: positions, causal, window and documents as in `transformer_block`; causal if not
            given.

    Returns:
        (B, S, V) in the dtype of the weights: float64 for the reference proper.
    """
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[tokens]
    numbers = sorted(
        {int(name.split(".")[2]) for name in weights if name.startswith("model.layers.")}
    )
    head_dim = weights[f"model.layers.{numbers[0]}.self_attn.q_proj.weight"].shape[0] // num_heads
    frequencies = llama_frequencies(head_dim, rope_theta, rope_scaling)
    options = {
        "num_heads": num_heads,
        "norm": "rms",
        "eps": eps,
        "rope_base": frequencies,
        "softmax_scale": llama_amplitude(rope_scaling) ** 2 * head_dim**-0.5,
        "causal": True,
        **seen,
    }
    for number in numbers:
        layer = {
            f"{ours}.weight": weights[f"model.layers.{number}.{theirs}.weight"]
            for ours, theirs in _PARTS.items()
        }
        x = transformer_block(x, layer, rounding=rounding, **options)
    x = rounding(rms_norm(x, weights["model.norm.weight"], eps))
    return rounding(x @ weights.get("lm_head.weight", embedding).T)


def llama_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None
) -> list[float]:
    """Return the radians per token of each pair of dims, scaled by wavelength.

    Args:
        head_dim: D, even.
        theta: base of the frequencies.
        scaling: None, or a mapping with "rope_type" "linear", "llama3" or "yarn" and its fields.

    Source: Grattafiori et al. 2024, The Llama 3 Herd of Models, and Meta's `apply_scaling` in
    llama-models, llama3/model.py. YaRN: Peng et al. 2023, and the authors' code.
    """
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return plain
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return [f / factor for f in plain]
    if scaling["rope_type"] == "llama3":
        return [_llama3(f, factor, scaling) for f in plain]
    first, last = _blended(head_dim, theta, scaling)
    shares = [min(max((i - first) / (last - first), 0), 1) for i in range(head_dim // 2)]
    return [f * (1 - share) + f / factor * share for f, share in zip(plain, shares, strict=True)]


def llama_amplitude(scaling: Mapping[str, Any] | None) -> float:
    """Return the factor of rotated queries and keys; the factor of the logits is its square.

    Source: Peng et al. 2023, YaRN, equation 22; `mscale` as DeepSeek-V2 has it.
    """
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    stretched = max(math.log(scaling["factor"]), 0.0) / 10
    above, below = (float(scaling.get(name) or 0) for name in ("mscale", "mscale_all_dim"))
    if not (above and below):
        above, below = 1.0, 0.0
    return (above * stretched + 1) / (below * stretched + 1)


def _blended(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[float, float]:
    """Return the last pair of dims whose frequency stays, and the first whose frequency falls."""
    length = float(scaling["original_max_position_embeddings"])
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        turns = [length * theta ** (-2 * i / head_dim) / (2 * math.pi) for i in range(head_dim)]
        first = max((float(i) for i, turn in enumerate(turns) if turn >= fast), default=0.0)
        last = min(
            (float(i) for i, turn in enumerate(turns) if turn <= slow), default=head_dim - 1.0
        )
    else:
        per = head_dim / 2 / math.log(theta)
        first = max(per * (math.log(length / (2 * math.pi)) - math.log(fast)), 0.0)
        last = min(per * (math.log(length / (2 * math.pi)) - math.log(slow)), head_dim - 1.0)
    return first, last if last != first else first + 0.001


def _llama3(frequency: float, factor: float, scaling: Mapping[str, Any]) -> float:
    """Return the frequency: short waves stay, long ones are stretched, the rest is blended."""
    length, wave = float(scaling["original_max_position_embeddings"]), 2 * math.pi / frequency
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    if wave < length / high:
        return frequency
    if wave > length / low:
        return frequency / factor
    smooth = (length / wave - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency
