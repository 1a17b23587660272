"""Tokens and weights: the same on every rank, and such that a wrong block is far from the right one.

Weights are wide enough for attention to choose: logits have a standard deviation of about 2, so that leaving keys out, or taking
the wrong ones, changes the output by far more than rounding does, in 16 bits too. Positions are added to the embedding, so that
no two tokens are alike.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.corpus import source_bytes
from benchmarks.records import Case

LOGIT_GAIN = 1.5
BIAS_WIDTH = 0.1
WAVELENGTH = 10_000.0


def tokens(case: Case, positions: Tensor, seed: int = 0) -> Tensor:
    """The embedded text at the given positions.

    Args:
        case: batch, sequence and width.
        positions: int64 (N,), places in the sequence.
        seed: of the embedding.

    Returns:
        float32 (B, N, E).

    Source: the positions are those of Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762, section 3.5.
    """
    batch, seq, hidden = (case.shape[name] for name in ("batch", "seq", "hidden"))
    text = torch.frombuffer(bytearray(source_bytes(batch * seq)), dtype=torch.uint8).view(batch, seq)
    table = torch.randn(256, hidden, generator=torch.Generator().manual_seed(seed))
    embedded: Tensor = nn.Embedding.from_pretrained(table)(text[:, positions].long())
    return embedded + _waves(positions, hidden)


def fill(block: nn.Module, seed: int) -> None:
    """Draw all weights from one seed: matrices normal, 1/sqrt(fan in) wide, those of queries and keys LOGIT_GAIN wider."""
    for number, (name, parameter) in enumerate(block.named_parameters()):
        if parameter.ndim == 1 and name.endswith("weight"):
            continue  # of a norm: ones
        gain = LOGIT_GAIN if "q_proj" in name or "k_proj" in name else 1.0
        width = gain / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else BIAS_WIDTH
        generator = torch.Generator(parameter.device).manual_seed(seed + number)
        with torch.no_grad():
            parameter.normal_(0.0, width, generator=generator)


def _waves(positions: Tensor, hidden: int) -> Tensor:
    rates = WAVELENGTH ** -(torch.arange(0, hidden, 2) / hidden)
    angles = positions[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :hidden]
