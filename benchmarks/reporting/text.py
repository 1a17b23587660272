"""Numbers and foreign words as text.

What a record says may come from anyone: it is made plain here, and escaped where it is written.
"""

from __future__ import annotations

import math
import unicodedata

DASH = "-"
LONGEST = 160  # characters of a foreign text that are shown
BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def plain(value: object, longest: int = LONGEST) -> str:
    """A value on one line, without characters that are invisible or turn the text round, cut to a length."""
    spaced = "".join(" " if unicodedata.category(c) in ("Cc", "Zl", "Zp", "Zs") else c for c in str(value))
    shown = " ".join("".join(c for c in spaced if unicodedata.category(c)[0] != "C").split())
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")  # 99.96 has as many digits before the point as 100
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, without the unit."""
    return significant(seconds * 1e3)


def gigabytes(rate: float | None) -> str:
    """Bytes per second as GB/s (1e9), without the unit."""
    return DASH if rate is None else significant(rate / 1e9)


def percent(share: float | None) -> str:
    """A share as a percentage."""
    return DASH if share is None else f"{share:.1%}" if abs(share) < 0.1 else f"{share:.0%}"


def size(count: float | None) -> str:
    """Bytes with a binary unit."""
    if count is None:
        return DASH
    step = max(0, min(len(BINARY) - 1, math.floor(math.log2(count) / 10))) if count >= 1 else 0
    return f"{significant(count / 1024**step) if step else f'{count:.0f}'} {BINARY[step]}"


def count(value: float | None) -> str:
    """A whole number with separators."""
    return DASH if value is None else f"{value:,.0f}"
