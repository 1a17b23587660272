"""Test the structure of the package: who imports whom, what importing loads, how long files are."""

import ast
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from studies.commands import ROOT, output_of, outside

ROOMS = (
    ("errors", "findings", "link", "machine"),
    ("compiling", "kinds", "launch", "observer", "progress", "scratch", "segments"),
    ("arguments",),
    ("failing", "mask", "programs"),
    ("sharding",),
    ("attention", "scheduling", "tuning"),
    ("transport",),
    ("agreement", "counters"),
    ("communicator",),
    ("mesh",),
    ("collectives",),
    ("schemes", "shared_tensors"),
    ("nn", "cost"),
    ("llama", "projection"),
    ("integrations",),
    ("__init__",),
    ("measuring",),
    ("doctor",),
    ("inference",),
    ("__main__",),
    ("testing",),
)
"""All modules and folders of sp_core (rooms). A room may import itself and rooms in lines above."""

LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
USES_MPI = (
    *(
        "agreement",
        "communicator",
        "doctor",
        "failing",
        "findings",
        "inference",
        "measuring",
        "mesh",
    ),
    *("testing", "transport", "__main__"),
)
STANDARD = {*sys.stdlib_module_names}
MAY_IMPORT: dict[str, set[str]] = {
    "sp_core/launch": STANDARD | {"sp_core"},
    "tests/oracle/reference": STANDARD | {"torch"},
    **{
        f"sp_core/{room}": STANDARD
        | {"jinja2", "lazy_loader", "numpy", "safetensors", "sp_core"}
        | {"tokenizers", "torch", "transformers"}
        for room in LEVEL
        if room not in (*USES_MPI, "launch")
    },
}
"""The packages that files of these rooms may import; mpi4py only where MPI is needed."""
MAX_FILE, MAX_FUNCTION, MAX_MEDIAN = 400, 40, 8
MAX_LOADED = 45
"""The greatest number of sp_core's modules that importing one scheme may load."""


def read(*folders: str) -> dict[str, str]:
    """Return the text of all Python files in some folders, by path."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def room_of(path: str) -> str:
    return path.split("/")[1].removesuffix(".py")


def imported(path: str, text: str) -> Iterator[str]:
    """Yield the dotted names that a file imports anywhere. Relative names are made absolute."""
    package = path.split("/")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def turned_arrows(sources: dict[str, str]) -> list[str]:
    """Return the imports against the order of ROOMS, and the files whose room ROOMS lacks."""
    found = []
    for path, text in sources.items():
        room = room_of(path)
        if room not in LEVEL:
            found.append(f"{path}: the room {room} has no place in ROOMS")
            continue
        for name in imported(path, text):
            target = target_room(name) or room
            if target != room and LEVEL[target] >= LEVEL[room]:
                found.append(f"{path} imports {name}")
    return found


def target_room(name: str) -> str | None:
    """Return the room of a dotted name, or None for a name outside sp_core."""
    parts = name.split(".")
    if parts[0] != "sp_core":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else "__init__"


def foreign(sources: dict[str, str]) -> list[str]:
    """Return the imports that MAY_IMPORT does not allow."""
    return [
        f"{path} imports {name}"
        for path, text in sources.items()
        for folder, allowed in MAY_IMPORT.items()
        if path.startswith((f"{folder}/", f"{folder}.py"))
        for name in imported(path, text)
        if name.split(".")[0] not in allowed and not name.startswith(folder.replace("/", "."))
    ]


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield for every function its name, and its number of lines without the docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            has_text = ast.get_docstring(node) is not None
            docstring = (first.end_lineno or 0) - first.lineno + 1 if has_text else 0
            yield (
                f"{node.name} in line {node.lineno}",
                (node.end_lineno or 0) - node.lineno + 1 - docstring,
            )


def test_imports_go_one_way() -> None:
    sources = read("sp_core")
    assert turned_arrows(sources) == []
    assert foreign(sources | read("tests/oracle")) == []


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("sp_core/sharding.py", "from sp_core.mesh import Mesh", [turned_arrows]),
        ("sp_core/transport/host.py", "def f():\n    import sp_core.communicator", [turned_arrows]),
        ("sp_core/collectives/api.py", "from sp_core import nn", [turned_arrows]),
        ("sp_core/schemes/ring.py", "from sp_core import Mesh", [turned_arrows]),
        ("sp_core/mask/blocks.py", "from ..collectives import maps", [turned_arrows]),
        ("sp_core/nn/layers.py", "from sp_core.testing import given", [turned_arrows]),
        ("sp_core/inference.py", "from sp_core.testing import run_threads", [turned_arrows]),
        ("sp_core/launch/watch.py", "from sp_core.sharding import Sharding", [turned_arrows]),
        ("sp_core/errors.py", "from sp_core import machine", [turned_arrows]),
        ("sp_core/novelty.py", "", [turned_arrows]),
        ("sp_core/nn/layers.py", "def f():\n    from mpi4py import MPI", [foreign]),
        ("sp_core/launch/watch.py", "import numpy", [foreign]),
        (
            "tests/oracle/reference/dense.py",
            "from sp_core.attention import local_attention",
            [turned_arrows, foreign],
        ),
        ("sp_core/schemes/ring.py", "from sp_core.schemes.problem import check_call", []),
        ("sp_core/schemes/ring.py", "from . import problem", []),
        ("sp_core/schemes/ring.py", "from sp_core import agreement\nimport torch", []),
    ],
)
def test_a_wrong_import_is_found(path: str, text: str, told: list[Any]) -> None:
    assert [look for look in (turned_arrows, foreign) if look({path: text})] == told


MAKES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
"""Functions of torch that make a tensor on the default device if no device is given."""


def without_device(sources: dict[str, str]) -> list[str]:
    """Return the calls of functions in MAKES that name no device."""
    return [
        f"{path}: {ast.unparse(node)}"
        for path, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).removeprefix("torch.") in MAKES
        and ast.unparse(node.func).startswith("torch.")
        and "device" not in [keyword.arg for keyword in node.keywords]
    ]


def test_tensors_are_not_made_on_the_default_device() -> None:
    """A program may have any default device. A mesh and its arguments say where tensors live."""
    assert without_device({"x.py": "torch.ones(2)\ntorch.ones(2, device=x.device)"}) == [
        "x.py: torch.ones(2)"
    ]
    assert without_device(read("sp_core")) == []


ALONE = {
    "a scheme, and everything": f"""
import sys, sp_core.schemes.ring
loaded = [name for name in sys.modules if name.startswith('sp_core')]
assert len(loaded) <= {MAX_LOADED}, loaded
assert not [name for name in loaded if name.startswith('sp_core.collectives')], loaded
import sp_core as sp
sp.llama.train.train_step, sp.llama.pipeline.forward
import importlib, pkgutil
names = [m.name for m in pkgutil.walk_packages(sp.__path__, 'sp_core.')]
for name in names:
    if not name.endswith('__main__'):
        importlib.import_module(name)
assert len(names) > 20, names
assert 'mpi4py' not in sys.modules
""",
    "tests of programs without torch do not wait for it": """
import sys
from sp_core.testing import CheckedComm, given, plugin, run_threads, spmd
assert run_threads(3, lambda comm: comm.allgather(comm.rank)) == [[0, 1, 2]] * 3
assert 'torch' not in sys.modules
""",
    "installing the kit does not start MPI in other programs": """
import sys, sp_core.testing, sp_core.testing.plugin, sp_core.testing.launch
assert not {'mpi4py', 'hypothesis'} & sys.modules.keys()
import sp_core.testing.engine, sp_core.testing.checked, sp_core.testing.agreed
assert 'mpi4py.MPI' not in sys.modules
""",
    "no call imports the compiler by itself: it takes a second and tens of MB, of every rank": """
import sys, torch, sp_core as sp
from sp_core.testing import run_threads
def body(comm):
    with sp.Mesh(comm, sp=comm.size) as mesh:
        x = torch.ones(1, 2, 8, requires_grad=True)
        sharding = sp.Sharding.contiguous(2 * comm.size, comm.size)
        block = sp.TransformerBlock(8, 2, comm=mesh['sp'])
        block(x, sharding=sharding).sum().backward()
        sp.plan('all_reduce', x.detach(), comm=mesh['sp']).run()
run_threads(2, body)
assert 'torch._dynamo' not in sys.modules
""",
}
"""Programs that each run in a new Python process, which has imported nothing yet."""


@pytest.mark.parametrize("what", ALONE)
def test_what_is_loaded(what: str) -> None:
    output_of([sys.executable, "-c", ALONE[what]], ROOT, outside(), 120)


def test_files_and_functions_are_short() -> None:
    sources = {
        **read("sp_core", "benchmarks", "tests"),
        "noxfile.py": (ROOT / "noxfile.py").read_text(),
    }
    files = {path: len(text.splitlines()) for path, text in sources.items()}
    lengths = {
        f"{path}: {name}": lines
        for path, text in sources.items()
        for name, lines in functions(text)
    }
    long = {path: lines for path, lines in files.items() if lines > MAX_FILE}
    assert long == {}, f"split these files: {MAX_FILE} lines are allowed, docstrings among them"
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION} == {}
    assert statistics.median(lengths.values()) <= MAX_MEDIAN


def test_a_docstring_does_not_make_a_function_long() -> None:
    text = 'def f(x):\n    """One.\n\n    Two.\n    """\n    return x\n'
    assert list(functions(text)) == [("f in line 1", 2)]
