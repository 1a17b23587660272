"""Run a program in its own namespace of processes: what it starts ends with it.

It can signal no process outside.
A wrong edit of the code that ends leftover processes would else end those of the whole machine.
Shared memory is its own, too.

Source: pid_namespaces(7), mount_namespaces(7), user_namespaces(7).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

NEW_MOUNTS, NEW_USER, NEW_PROCESSES = 0x00020000, 0x10000000, 0x20000000
RECURSIVE_PRIVATE = 0x4000 | 0x40000
DIED = 128
"""Added to the signal that has ended the program."""


def alone(work: Callable[[], int]) -> NoReturn:
    """Do some work in a new namespace, and end this process as the work has ended.

    Raises:
        OSError: this machine allows no new namespace.
    """
    _leave()
    init = os.fork()
    if init:
        _end_alike(os.waitpid(init, 0)[1])
    _call("mount", b"none", b"/", None, RECURSIVE_PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
    worker = os.fork()
    if not worker:
        code = 1
        try:
            code = work()
        except BaseException:  # noqa: BLE001 - this process ends here, whatever it was
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # threads that a wrong edit has stranded would be waited for
    while True:  # the first process of a namespace inherits the others' children
        process, status = os.wait()
        if process == worker:
            os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else DIED + os.WTERMSIG(status))


def _leave() -> None:
    """Enter new namespaces; one who is not root becomes root of a namespace of users first."""
    user, group = os.getuid(), os.getgid()
    try:
        _call("unshare", NEW_MOUNTS | NEW_PROCESSES)
    except PermissionError:
        _call("unshare", NEW_USER | NEW_MOUNTS | NEW_PROCESSES)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {user} 1"),
            ("gid_map", f"0 {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _end_alike(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    number = -code if code < 0 else code - DIED
    if number > 0:
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        os.kill(os.getpid(), number)
    os._exit(code)


if __name__ == "__main__":
    alone(lambda: subprocess.call(sys.argv[1:]))
