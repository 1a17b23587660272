"""Pass what is typed at this process's terminal on to a process in another session."""

import os
import select
import threading
import time
from contextlib import suppress

PAUSE_SECONDS = 0.1
"""Pause between two looks whether this process is in the terminal's foreground again."""


def typed() -> int | None:
    """Return the reading end of a pipe to which a thread copies what is typed at the terminal.

    In the background nothing is read, because the system would stop this process. Return None if
    standard input is no terminal.
    """
    if not os.isatty(0):
        return None
    reading, writing = os.pipe()
    threading.Thread(target=_copy, args=(writing,), daemon=True).start()
    return reading


def _copy(writing: int) -> None:
    text = b"any"
    with suppress(OSError), os.fdopen(writing, "wb", buffering=0) as pipe:
        while text:  # until Ctrl-D
            select.select([0], [], [])
            if _may_read():
                pipe.write(text := os.read(0, 4096))
            else:
                time.sleep(PAUSE_SECONDS)


def _may_read() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # the terminal controls another session, or none
        return True
