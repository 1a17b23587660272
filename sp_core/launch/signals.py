"""Handle signals in a launcher, such as Ctrl-C, while it starts, watches and ends its ranks."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

ENDING = (
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)
"""Signals that batch systems and people send to end a program. Python handles SIGINT."""


@contextmanager
def handled(numbers: Iterable[int], handle: Callable[[int, object], object]) -> Iterator[None]:
    """Call `handle` for these signals until the block ends, then restore their handlers."""
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def on_ending(handle: Callable[..., object]) -> AbstractContextManager[None]:
    """Call `handle` on signals in `ENDING`, whose default action would end only the launcher.

    `handle` can then end the ranks. Ignored signals, as under `nohup`, stay ignored.
    """
    ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    return handled(ours, handle)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Hold back signals that end this process, such as a second Ctrl-C, until the block ends.

    Blocking them would not do: another thread would receive them, and Python act on them here.
    """
    came: list[int] = []
    try:
        with handled((signal.SIGINT, *ENDING), lambda number, _: came.append(number)):
            yield
    finally:
        for first in came[:1]:
            signal.raise_signal(first)
