"""Check options while they are parsed: types for `ArgumentParser.add_argument`."""

import argparse
import math
from collections.abc import Callable


def at_least(least: float, kind: type[int | float] = int) -> Callable[[str], float]:
    """Return a type of an option: a finite number that is not less than `least`."""

    def parsed(text: str) -> float:
        if not least <= (value := kind(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not {least:g} or more.")
        return value

    parsed.__name__ = kind.__name__  # argparse names it where the text is no number
    return parsed


def some_of(*choices: str) -> Callable[[str], list[str]]:
    """Return a type of an option: one or more of these words, with commas between them."""

    def parsed(text: str) -> list[str]:
        for word in (words := text.split(",")):
            if word not in choices:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(choices)}.")
        return words

    return parsed
