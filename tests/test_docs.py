"""Test the documentation: it has every public name, and tests run every program in it."""

import ast
import importlib
import re
import textwrap
from pathlib import Path

import pytest
from domains.public import commands, described
from oracle.proof import verify
from oracle.schedule_cases import schedule

import sp_core
from sp_core import llama, scheduling, testing
from sp_core.nn import parallel
from sp_core.nn.replicated import ReplicatedLayer
from sp_core.programs import doubling, table
from sp_core.schemes import SCHEMES
from sp_core.testing import engine

pytestmark = pytest.mark.mpi_skip
ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
RUN_BY_TESTS = ("examples/", "tests/example_project/", "tests/hf/")
DESCRIBED = described()


@pytest.mark.parametrize("package", [sp_core, llama, scheduling, testing], ids=lambda p: p.__name__)
def test_every_public_name_has_a_place(package: object) -> None:
    names = {f"{vars(package)['__name__']}.{name}" for name in vars(package)["__all__"]}
    # constants have no docstring; a module has a page
    public = {name for name in names if not name.rsplit(".", 1)[1].isupper()} - {"sp_core.llama"}
    assert len(public) > 5
    assert public - {*DESCRIBED} == set()


def test_what_is_described_has_a_text_whose_stars_markdown_does_not_eat() -> None:
    assert len(DESCRIBED) == len({*DESCRIBED}) > 100
    assert _stars_in_text("elements: 2*B*K, and (P-1) * `a*b`") == ["2*B", "B*K"]
    for name in DESCRIBED:
        described = _found(name)
        assert described.__doc__, name
        members = vars(described).values() if isinstance(described, type) else ()
        for text in (each.__doc__ or "" for each in (described, *members)):
            assert _stars_in_text(text) == [], f"{name}: put the formula between backticks"


def _stars_in_text(text: str) -> list[str]:
    """Return each `*` outside of backticks with its two neighbours, if neither is a space."""
    outside = re.sub(r"`[^`]*`", "", text)
    return re.findall(r"(?=([^\s*]\*[^\s*]))", outside)


def _found(name: str) -> object:
    """Return the object that a name refers to; a function precedes a module of the same name."""
    package, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(package), attribute, None) or importlib.import_module(
        name
    )


def _hides_its_module(name: str) -> bool:
    """Return whether `name` is a function that hides its module, which has the same name."""
    found = _found(name)
    package, _, module = getattr(found, "__module__", "").rpartition(".")
    return module == _last(name) and getattr(importlib.import_module(package), module) is found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def test_a_function_with_the_name_of_its_module_is_chosen_as_a_member() -> None:
    """If the page did not choose it, mkdocstrings would describe the module."""
    text = "".join(page.read_text() for page in PAGES)
    hidden = [name for name in DESCRIBED if _hides_its_module(name)]
    assert sorted(hidden) == ["sp_core.llama.generate", "sp_core.merge"]
    for name in hidden:
        assert f"::: {name}\n    options:\n      members: [{_last(name)}]\n" in text


@pytest.mark.parametrize(
    ("base", "members"),
    [(ReplicatedLayer, "weights"), (parallel._ParallelLinear, "from_linear, to_linear")],
)
def test_the_page_of_a_layer_shows_methods_of_its_base_class(base: type, members: str) -> None:
    """Without the option mkdocstrings shows only methods that the class itself defines."""
    text = (ROOT / "docs" / "api" / "nn.md").read_text()
    layers = [x for x in DESCRIBED if isinstance(of := _found(x), type) and issubclass(of, base)]
    assert len(layers) > 1
    for name in layers:
        assert f"::: {name}\n    options:\n      inherited_members: [{members}]\n" in text


def test_every_program_is_run_by_a_test() -> None:
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    included = [re.fullmatch(r'--8<-- "([\w./]+\.py)"\n', block) for block in blocks]
    assert len(included) > 8
    assert all(included), "write the program to examples/, and include it"
    paths = [match[1] for match in included if match]
    assert all(path.startswith(RUN_BY_TESTS) and (ROOT / path).exists() for path in paths)


@pytest.mark.parametrize(("size", "root"), [(1, 0), (2, 1), (5, 2)])
def test_the_algorithm_that_a_page_adds_is_right(
    size: int, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "how_to" / "extend.md").read_text()
    program, name = re.findall(r"\n\n((?:    (?:def|\").*\n)(?:    .*\n)*)", text)
    known = {**vars(doubling)}
    exec(textwrap.dedent(program), known)
    monkeypatch.setattr(doubling, "flat", known["flat"], raising=False)
    monkeypatch.setattr(table, "_BUILDERS", {**table._BUILDERS, **ast.literal_eval(f"{{{name}}}")})
    verify(schedule("broadcast", "flat", tuple(range(size)), root))


def test_the_table_of_tests_names_every_file() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    patterns = re.findall(r"`((?:hf/)?test_[\w*]+\.py)`", text)
    files = {
        path.relative_to(ROOT / "tests").as_posix()
        for path in (ROOT / "tests").glob("**/test_*.py")
    }
    files = {name for name in files if "/" not in name or name.startswith("hf/")}
    unnamed = [name for name in sorted(files) if not any(map(Path(name).match, patterns))]
    assert unnamed == [], "name these files in the table of tests/README.md"
    assert [one for one in patterns if not any(Path(name).match(one) for name in files)] == []


def test_the_table_of_algorithms_is_that_of_the_library() -> None:
    text = (ROOT / "docs" / "api" / "collectives.md").read_text()
    shown = {
        op: tuple(re.findall(r'"(\w+)"', names))
        for ops, names in re.findall(r"^\| (`.+`) \| (.+) \|$", text, re.MULTILINE)
        for op in re.findall(r"`(\w+)`", ops)
    }
    assert shown == table.SCHEDULED, "write the names into the table of docs/api/collectives.md"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("commands.md", [name.removeprefix("sp-core ") for name in commands()]),
        ("how_to/choose.md", [f"{name}_attention" for name in (*SCHEMES, "hybrid")]),
    ],
)
def test_a_page_has_every_command_or_scheme(page: str, names: list[str]) -> None:
    firsts = re.findall(r"^\| (`.+?) \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    shown = {name for cell in firsts for name in re.findall(r"`(\w+)`", cell)}
    assert {*names} - shown == set(), f"write a row into the table of docs/{page}"


def test_every_page_can_be_found() -> None:
    listed = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == [str(page.relative_to(ROOT / "docs")) for page in PAGES]


def texts() -> list[Path]:
    """Return all Markdown files."""
    folders = ("docs", "benchmarks", "tests", ".github", "examples")
    return [*ROOT.glob("*.md"), *(f for name in folders for f in (ROOT / name).rglob("*.md"))]


@pytest.mark.parametrize(
    ("pattern", "least", "places"),
    [
        pytest.param(
            r"`([\w./*-]+/[\w*.-]+\.(?:py|sh|toml|sbatch|yml|md|jsonl?|png))`",
            50,
            (ROOT, ROOT / "sp_core"),
            id="names with a folder, from the root or from the folder of the text",
        ),
        pytest.param(
            r"\]\((?!https?:|#|pictures/|{{)([^)#\s]+)",
            20,
            (),
            id="links; mkdocs checks anchors and the pictures that it makes",
        ),
    ],
)
def test_files_that_a_text_refers_to_are_there(
    pattern: str, least: int, places: tuple[Path, ...]
) -> None:
    named = [
        (file, path)
        for file in texts()
        for path in re.findall(pattern, file.read_text())
        if not path.startswith("reports/")  # commands write there
    ]
    assert len(named) > least
    lost = [
        (file, path)
        for file, path in named
        if not any([*base.glob(path)] for base in (file.parent, *places))
    ]
    assert lost == []


def test_the_texts_say_how_many_examples_run_again() -> None:
    tutorial = (ROOT / "docs" / "tutorials" / "testing.md").read_text()
    assert f"up to {engine.MAX_RAW_EXAMPLES} passed examples" in tutorial
    assert f"up to {engine.MAX_RAW_EXAMPLES} drawn inputs" in (ROOT / "README.md").read_text()


def test_each_section_of_the_results_names_a_committed_record_and_its_processor() -> None:
    """Its figures can be printed again from the record; whether they agree is not checked."""
    _, *sections = (ROOT / "docs" / "results.md").read_text().split("\n## ")
    assert len(sections) > 5
    kept = re.compile(r"`(benchmarks/results/[\w*-]+\.jsonl?|tests/conformance/REPORT\.md)`")
    for part in sections:
        records = [path.read_text() for name in kept.findall(part) for path in ROOT.glob(name)]
        assert records, part
        models = {*re.findall(r'"cpu_model": ?"(\w+)', "\n".join(records))}
        assert [model for model in models if model not in part] == [], part
        unnamed = ("processor was not recorded", "Intel Xeon", "conformance/REPORT.md")
        assert models or any(words in part for words in unnamed), part
