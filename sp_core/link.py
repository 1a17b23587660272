"""Describe a link between ranks by its latency and rate, as `sp-core plan` reads it."""

import math
import re
from dataclasses import dataclass

PREFIXES = {"g": 1e9, "m": 1e6}
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """Give the time of messages: one of n bytes takes `alpha + beta * n` seconds.

    Args:
        alpha: seconds of a message without bytes.
        beta: seconds per byte.
    """

    alpha: float
    beta: float

    def __call__(self, nbytes: float, messages: int = 1) -> float:
        return messages * self.alpha + nbytes * self.beta


def link_of(text: str) -> Link:
    """Read a link, such as "25gbit,10us" or "400MB,1ms": rate per second, time of an empty message.

    "b" and "bit" stand for bits, "B" for bytes. All other letters may be in either case.

    Raises:
        ValueError: the text is not a rate and a time like these.
    """
    found = re.fullmatch(
        r"([\d.]+)([gm])(bit|b)(?:/s)?,([\d.]+)(ns|us|ms|s)", text.strip(), re.IGNORECASE
    )
    try:
        rate, prefix, unit, latency, scale = found.groups() if found else [""] * 5
        per_second = float(rate) * PREFIXES[prefix.lower()] / (1 if unit == "B" else 8)
        link = Link(float(latency) * SECONDS[scale.lower()], 1 / per_second)
    except (KeyError, ValueError, ZeroDivisionError):
        link = Link(math.inf, 0.0)
    if not (link.alpha < math.inf and 0 < link.beta < math.inf):
        raise ValueError(
            f"link {text!r} was given; pass RATE,LATENCY such as 25gbit,10us or 400MB,1ms (b: "
            "bits, B: bytes)."
        )
    return link
