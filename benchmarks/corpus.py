"""Make the input of the experiment from text that is on every machine: Python's library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.records import Case

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@cache
def source_files() -> list[bytes]:
    """Return the standard library's .py files that are not empty, in the order of their names.

    Raises:
        RuntimeError: no source was found, as in an interpreter that ships only compiled modules.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = [text for text in _sources(library) if text]
    if not found:
        raise RuntimeError(
            f"no .py files under {library}: this Python has no source of its standard library."
        )
    return found


def source_bytes(count: int) -> bytes:
    """Return the first `count` bytes of the library's source; at its end it starts again."""
    text = b"".join(source_files())
    return (text * -(-count // len(text)))[:count]


def _sources(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in SKIPPED:
            yield from _sources(path)
        elif path.suffix == ".py" and path.is_file():
            yield path.read_bytes()


LOGIT_GAIN = 1.5
BIAS_WIDTH = 0.1
WAVELENGTH = 10_000.0


def tokens(case: Case, positions: Tensor, seed: int = 0) -> Tensor:
    """Embed the text at the given positions.

    Args:
        case: batch, sequence and width.
        positions: int64 (N,), places in the sequence.
        seed: of the embedding.

    Returns:
        float32 (B, N, E).

    Source: the positions are those of Vaswani et al. 2017, Attention Is All You Need,
    arXiv:1706.03762, section 3.5.
    """
    batch, seq, hidden = (case.shape[name] for name in ("batch", "seq", "hidden"))
    text = torch.frombuffer(bytearray(source_bytes(batch * seq)), dtype=torch.uint8).view(
        batch, seq
    )
    table = torch.randn(256, hidden, generator=torch.Generator().manual_seed(seed))
    embedded: Tensor = nn.Embedding.from_pretrained(table)(text[:, positions].long())
    return embedded + _waves(positions, hidden)


def fill(block: nn.Module, seed: int) -> None:
    """Draw all weights from one seed: matrices normal, 1/sqrt(fan in) wide.

    Those of queries and keys are LOGIT_GAIN wider.
    """
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
