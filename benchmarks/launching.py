"""Start the ranks of one measurement under a launcher, and return their record."""

import argparse
import contextlib
import functools
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "reports"
"""The folder for files unless `--out` names another one; git ignores it."""

POLL_SECONDS, ENDING_SECONDS = 0.1, 20.0
GRACE_SECONDS = 15  # the launcher has the same limit and needs time to say where each rank was
NO_MEMORY = (
    "OutOfMemoryError",
    "out of memory",
    "can't allocate memory",
    "MemoryError",
    "oom-kill",
)
KILLED = ("signal 9", "Killed")  # the kernel or a person killed a rank; no text says why

KEEP_MEMORY = (
    "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=17179869184"
)
"""Make the C library keep freed memory. Otherwise it is chance whether the kernel clears the same
pages in every step of a launch: Ulysses, forward, P = 2, on two cores, takes 7.0 to 9.6 ms without,
and 6.8 to 7.5 ms with this."""

Record = dict[str, Any]
Options = dict[str, Record]
Progress = Callable[..., None]
"""A function that is called with rank 0's progress: the arguments of `worker.Rank.tell`."""

Main = Callable[[Sequence[str] | None], int]
USAGE, INTERRUPTED = 2, 130


class UsageError(ValueError):
    """Options that cannot be run; the text says why and what to pass instead."""


@dataclass(frozen=True)
class Launch:
    """How ranks are started.

    Args:
        prefix: command in front of the worker, with `{ranks}` for the number of ranks; if empty,
            sp_core's own launcher.
        timeout: seconds that one launch may take.
        variables: NAME=VALUE to set and -uNAME to unset in the environment of the ranks.
        mpi_args: more arguments for mpiexec.
        around: command in front of sp_core's own launcher.

    Raises:
        UsageError: the prefix has no `{ranks}` or no program, or cannot be split or filled in; or
            the timeout is not positive.
    """

    prefix: str = ""
    timeout: float = 600.0
    variables: tuple[str, ...] = ()
    mpi_args: tuple[str, ...] = ()
    around: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            program, *_ = shlex.split(self.prefix.format(ranks=1)) or [sys.executable]
        except (ValueError, LookupError, AttributeError) as error:
            raise UsageError(
                f"--launcher {self.prefix!r}: {error}. Close quotation marks, and double other "
                "braces than those of {ranks}."
            ) from None
        if self.prefix and "{ranks}" not in self.prefix:
            raise UsageError(
                f"--launcher {self.prefix!r} does not say where the number of ranks goes; "
                "write {ranks} in it."
            )
        if shutil.which(program) is None:
            raise UsageError(f"--launcher {self.prefix!r}: there is no {program} on the PATH.")
        if not self.timeout > 0:
            raise UsageError(f"--timeout is {self.timeout:g}; pass more than 0.")

    def command(self, ranks: int, *arguments: str) -> list[str]:
        """Return the command line that runs the worker on several ranks."""
        changed = ["env", *self.variables] if self.variables else []
        worker = (sys.executable, "-m", "mpi4py", "-m", "benchmarks.worker")
        program = [*changed, *worker, *arguments]
        if self.prefix:
            return [*shlex.split(self.prefix.format(ranks=ranks)), *program]
        more = [f"--mpi-args={shlex.join(self.mpi_args)}"] if self.mpi_args else []
        limits = ["-n", str(ranks), "--timeout", f"{self.timeout:g}"]
        launcher = (*self.around, sys.executable, "-m", "sp_core.testing.launch")
        return [*launcher, *limits, *more, "--", *program]


about = dict[str, Any]
"""Describe an option by the keywords of `ArgumentParser.add_argument`."""


def parse(
    name: str,
    text: str | None,
    options: Options,
    arguments: Sequence[str] | None,
    **defaults: object,
) -> argparse.Namespace:
    """Parse the command line of a program; `defaults` replace the defaults of `options`.

    A key of `options` has one or more names of an option, separated by spaces.
    """
    made = argparse.ArgumentParser(prog=name, description=text)
    for flags, keywords in options.items():
        made.add_argument(*flags.split(), **keywords)
    made.set_defaults(**defaults)
    return made.parse_args(arguments)


def starting(*, ranks: str, timeout: float) -> Options:
    """Return the options that say on how many ranks, on which device and how a program starts."""
    return {
        "--ranks": about(
            default=ranks, metavar="P,P,...", help="numbers of ranks (default: %(default)s)"
        ),
        "--device": about(default="cpu", metavar="KIND", help="cpu, or cuda (default: cpu)"),
        "--share-gpu": about(action="store_true", help="let several ranks use one GPU"),
        "--timeout": about(
            type=float,
            default=timeout,
            metavar="S",
            help="limit for each launch (default: %(default)g)",
        ),
        "--launcher": about(
            default="",
            metavar="COMMAND",
            help="instead of mpiexec, such as 'srun --ntasks={ranks}'",
        ),
    }


def numbers_of_ranks(
    text: str, least: int = 1, option: str = "--ranks", divide: int = 0
) -> list[int]:
    """Parse a list of distinct numbers such as "1,2,4", for `--ranks` or another option.

    Raises:
        UsageError: the text is no such list, or a number is less than `least`, or does not divide
            `divide`.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is not a list of numbers; pass one such as 1,2,4."
        ) from None
    if min(found) < least or len(set(found)) != len(found) or any(divide % n for n in found):
        needed = f"be {least} or more, {f'and divide {divide}, ' * bool(divide)}and appear once."
        raise UsageError(f"{option} {text}: every number must {needed}")
    return found


def writable(path: Path) -> Path:
    """Check that a file can be written, make its folder if it is missing, and return its path.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(
            f"--out {path} cannot be written: {error.strerror}. Pass a file that you may write."
        ) from None
    return path


def run(
    ranks: int,
    measure: str,
    setting: object,
    launch: Launch,
    progress: Progress = lambda **_: None,
    *,
    root: Path = ROOT,
) -> Record:
    """Start several ranks that measure, and wait for their end.

    Args:
        ranks: how many are started.
        measure: "module:function" that each rank calls with the setting and a
            `benchmarks.worker.Rank`.
        setting: plain values, or a msgspec Struct that the function reads as its `Setting`.
        launch: how ranks are started.
        progress: called with the progress of rank 0, whenever it changes.
        root: the checkout whose sp_core is measured.

    Returns:
        The record of rank 0, with "status" and "took_s" (seconds). A launch that fails has instead
        of the record a "reason", the last lines of "output", and "news", the last progress.
    """
    start = time.monotonic()
    REPORTS.mkdir(exist_ok=True)  # ranks on other nodes see this folder, but not the node's /tmp
    with tempfile.TemporaryDirectory(prefix="sp_core-bench-", dir=REPORTS) as name:
        folder = Path(name)
        job = {"ranks": ranks, "measure": measure, "setting": setting, "root": str(root)}
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        code, output = watch(launch.command(ranks, name), folder, launch.timeout, progress)
        record = folder / "record.json"
        if code == 0 and record.exists():
            found = {"status": "ok", **json.loads(record.read_text())}
        else:
            news = told(folder) or {"phase": "starting"}
            found = failure(code, output, launch.timeout, news["phase"])
            found |= {"output": tail(output), "news": news}
    return {"took_s": time.monotonic() - start, **found}


def write_json(path: Path, document: Any) -> None:
    """Replace a file in one step; make its folder if it is missing.

    Args:
        path: the file. It is written under its name with the suffix ".tmp", then renamed.
        document: values that JSON can hold.

    Raises:
        ValueError: a number is not finite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    draft.replace(path)


def tail(output: str) -> str:
    """Return the last 40 lines of an output."""
    return "\n".join(output.rstrip().splitlines()[-40:])


def watch(
    command: list[str], folder: Path, timeout: float, progress: Progress
) -> tuple[int | None, str]:
    """Run a command that writes its progress into a folder. Return its exit code and its output.

    The exit code is None if the command did not end in time.
    """
    code = known = None
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with (
        (folder / "output").open("w") as output,
        process(command, output, ROOT, variables) as started,
    ):
        end = time.monotonic() + timeout + GRACE_SECONDS
        while (code := started.poll()) is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            now = told(folder)
            if now is not None and now != known:
                progress(**now)
                known = now
    said = (folder / "output").read_text(errors="replace")
    return code, said.replace("\0", "")  # Open MPI ends some lines with a NUL character


@contextlib.contextmanager
def process(
    command: Sequence[str], output: Any, folder: Path, variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in its own process group, and end the whole group when the block ends.

    SIGTERM comes before SIGKILL, so that a launcher can end its ranks.
    """
    started = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield started
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(started.pid, kind)
                started.wait(timeout=ENDING_SECONDS)


def told(folder: Path) -> Record | None:
    """Return the latest progress of rank 0; None if there is none yet, or it is half written."""
    with contextlib.suppress(OSError, ValueError):
        return cast("Record", json.loads((folder / "progress").read_text()))
    return None


def failure(code: int | None, output: str, timeout: float, doing: str) -> Record:
    """Return status and reason of a launch that went wrong.

    Args:
        code: the exit code; None if the launch did not end in time.
        output: the text that the ranks and the launcher printed.
        timeout: the limit of the launch in seconds.
        doing: the latest phase of rank 0.
    """
    if code is None or "the launch has not ended after" in output:  # the launcher's words
        return {"status": "timeout", "reason": f"not finished after {timeout:g} s, while {doing}"}
    if any(text in output for text in NO_MEMORY):
        return {"status": "oom", "reason": f"out of memory, while {doing}"}
    if any(text in output for text in KILLED) or code in (137, -signal.SIGKILL):
        return {
            "status": "oom",
            "reason": f"killed, most likely because memory ran out, while {doing}",
        }
    lines = [line.strip() for line in output.splitlines() if any(map(str.isalpha, line))]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    complaint = (errors or lines or ["nothing was printed"])[0]
    return {"status": "failed", "reason": f"exit code {code} while {doing}: {complaint}"}


def program(
    name: str,
    text: str | None,
    options: Options,
    interrupted: str = "interrupted.",
    crashed: int = 1,
    **defaults: object,
) -> Callable[[Callable[[argparse.Namespace], int]], Main]:
    """Return a decorator that makes a program of a function; for the arguments see `parse`.

    The function takes the parsed options and returns the exit code. Bad options and an interruption
    are reported in one line, with the exit codes 2 and 130. Another error has the exit code
    `crashed`, and its traceback is printed.
    """

    def decorate(run: Callable[[argparse.Namespace], int]) -> Main:
        @functools.wraps(run)
        def guarded(arguments: Sequence[str] | None = None) -> int:
            try:
                return run(parse(name, text, options, arguments, **defaults))
            except UsageError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return USAGE
            except KeyboardInterrupt:
                print(f"\n{name}: {interrupted}", file=sys.stderr)
                return INTERRUPTED
            except Exception:  # noqa: BLE001  # its traceback is printed
                traceback.print_exc()
                return crashed

        return guarded

    return decorate


def main(program: Main) -> None:
    """Run a program as the command line does. Signals that would end it act like Ctrl-C.

    A signal that is ignored, as SIGHUP is under `nohup`, stays ignored.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters that its encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    from sp_core.launch.signals import ENDING  # `ci.append_history` has no sp_core

    for ending in ENDING:
        if signal.getsignal(ending) is signal.SIG_DFL:
            signal.signal(ending, signal.default_int_handler)
    sys.exit(program(None))
