"""Find by introspection what is public: functions and classes with their parameters."""

import argparse
import importlib
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from domains.declared import Subject
from sp_core.__main__ import make_parser
from sp_core.attention import Terms

MODULES = (
    *("sp_core", "sp_core.llama", "sp_core.llama.pipeline", "sp_core.llama.train"),
    *("sp_core.nn.loss", "sp_core.nn.gradients", "sp_core.scheduling", "sp_core.cost"),
)

OUTSIDE = {
    "Communicator": "`Mesh` makes it",
    "Mesh.to_device_mesh": "kit/case_torchrun.py calls it on processes of torch.distributed",
    "Pending": "the started collectives make it",
    "Plan": "`plan` makes it",
    "attention.Terms": "the schemes and `local_attention` take each of them",
    "collectives.api": "a module, whose functions have domains",
    "collectives.differentiable": "a module, whose functions have domains",
    "counters": "`Communicator` makes them",
    "gradients.Placement.is_alike": "`reduce_gradients` reads it",
    "integrations.transformers": "hf/test_parallelize*.py call it, where transformers is",
    "llama.Llama.check_parts": "the calls of a model make it; refusals/decoders.py changes a part",
    "llama.Llama.join_weights": "`Decoder` calls it",
    "llama.pipeline.forward": "`Decoder` calls it",
    "loss.check_labels": "`next_token_loss` and training call it",
    "loss.counted": "`next_token_loss` and pipelines call it",
    "sp-core doctor": "test_doctor.py runs it in processes of its own, with each MPI",
    "sp-core run": "test_kit_launch.py runs it with each MPI",
    "testing": "test_kit_*.py test the kit",
}
"""Public names without a domain, each with the reason; methods are named by their class."""


Public = Callable[..., Any] | argparse.ArgumentParser


def functions(modules: Iterable[str] = MODULES) -> dict[str, Public]:
    """Return functions, classes and methods by name, and with all modules also commands.

    The name of a submodule is put in front of its names, such as "llama.generate".
    """
    return {name: function for module in modules for name, function in _members(module)} | (
        commands() if modules is MODULES else {}
    )


def commands() -> dict[str, Public]:
    """Return the parser of each command by name."""
    (added,) = vars(make_parser())["_subparsers"]._group_actions
    return {f"sp-core {name}": parser for name, parser in added.choices.items()}


def described() -> list[str]:
    """Return the names that the documentation describes, in lines such as "::: name"."""
    pages = (Path(__file__).parents[2] / "docs").rglob("*.md")
    pattern = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
    return [name for page in pages for name in pattern.findall(page.read_text())]


def without_domain(subjects: Iterable[Subject]) -> list[str]:
    """Return every public parameter that no subject has a factor for, as "function(parameter)".

    A name in the documentation counts as public even if no module of `MODULES` has it.
    """
    declared: dict[str, set[str]] = defaultdict(set)
    for subject in subjects:
        for name in (subject.name, *subject.covers):
            declared[name] |= {factor.split(".")[0] for factor in subject.factors} | set(
                subject.outside
            )
    outside = tuple(f"{name}." for name in OUTSIDE)
    public = {name: parameters(function) for name, function in functions().items()} | {
        name.removeprefix("sp_core."): set()
        for name in described()
        if name.rpartition(".")[0] not in MODULES
    }
    wanted = {name: found for name, found in public.items() if not f"{name}.".startswith(outside)}
    undeclared = [f"{name}(): no subject" for name in wanted if name not in declared]
    return undeclared + [
        f"{name}({p})"
        for name in declared
        for p in sorted(wanted.get(name, set()) - declared[name])
    ]


def parameters(function: Public) -> set[str]:
    """Return the names of a function's parameters, or the options of a command."""
    if isinstance(function, argparse.ArgumentParser):
        return {action.option_strings[-1] for action in function._actions if action.dest != "help"}
    found = inspect.signature(function).parameters
    names = {name for name in found if name not in ("self", "terms")}
    return names | (Terms.__annotations__.keys() if "terms" in found else set())


def defaults() -> dict[str, set[float | str]]:
    """Return the numbers, booleans and texts that are defaults of each parameter or option."""
    found = defaultdict[str, set[float | str]](set)
    further = functions(["sp_core.integrations.transformers"])
    for function in (*functions().values(), *further.values()):
        for name, value in _scalars(function).items():
            found[name].add(value)
    return found


def _scalars(function: Public) -> dict[str, float | str]:
    """Return a function's or a command's defaults that are numbers, booleans or texts."""
    given: dict[str, Any] = (
        {action.dest: action.default for action in function._actions if action.dest != "help"}
        if isinstance(function, argparse.ArgumentParser)
        else {p.name: p.default for p in inspect.signature(function).parameters.values()}
    )
    return {name: x for name, x in given.items() if type(x) in (int, float, bool, str)}


def never_changed(subjects: Iterable[Subject]) -> set[str]:
    """Return the parameters with a default of `_scalars` that all rows of all subjects leave so."""
    others = Counter[str]()
    for subject in subjects:
        for name in (subject.name, *subject.covers):
            for factor, parts in subject.factors.items():
                parameter = factor.partition(".")[0].lstrip("-").replace("-", "_")
                others[f"{name}({parameter})"] += len(parts) - 1
    scalars = {f"{name}({p})" for name, x in functions().items() for p in _scalars(x)}
    return {name for name, count in others.items() if not count} & scalars


def _members(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    found = importlib.import_module(module)
    front = module.removeprefix("sp_core").removeprefix(".").removeprefix("nn.")
    listed = getattr(found, "__all__", None)
    for name in vars(found) if listed is None else listed:
        member = getattr(found, name)
        is_class, home = inspect.isclass(member), getattr(member, "__module__", None) or ""
        is_own = home == module if listed is None else home.startswith("sp_core")
        is_error = is_class and issubclass(member, Exception)
        if name.startswith("_") or is_error or not is_own or not callable(member):
            continue
        full = f"{front}.{name}".removeprefix(".")
        yield full, member
        yield from ((f"{full}.{name}", method) for name, method in _methods(member))


def _methods(kind: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods of a class and of its private base classes, with their names."""
    for name, method in inspect.getmembers(
        kind, lambda x: inspect.isfunction(x) or inspect.ismethod(x)
    ):
        owner = method.__qualname__.rpartition(".")[0]
        if not name.startswith("_") and (owner == kind.__name__ or owner.startswith("_")):
            yield name, method


def everything() -> dict[str, Public]:
    """Return public functions, classes and methods by name."""
    return functions((*MODULES, "sp_core.projection"))


def documented(words: str) -> set[str]:
    """Return the names, without modules, of everything public with these words in its docstring."""
    return {
        without_module(name)
        for name, x in everything().items()
        if words in (inspect.getdoc(x) or "")
    }


def without_module(name: str) -> str:
    """Return a name without the modules in front of it, whose names have no capital letters."""
    return re.sub(r"^[a-z_.]+\.", "", name)


def told_alike() -> set[str]:
    """Return the names of everything public whose docstring promises all ranks the same result."""
    said = re.compile(r"on every rank|all hold alike|all ranks hold alike|Every rank receives")
    return {without_module(name) for name, x in everything().items() if said.search(_of_result(x))}


def _of_result(x: Public) -> str:
    """Return the first paragraph of a docstring, and its section "Returns:"."""
    first, *sections = (inspect.getdoc(x) or "").split("\n\n")
    return " ".join([first, *(text for text in sections if text.startswith("Returns:"))])


def code_of(x: Public) -> Any:
    """Return the code of a function, or of a class's own constructor if it has one."""
    made: Any = vars(x).get("__init__") if inspect.isclass(x) else getattr(x, "__func__", x)
    return None if made is None else inspect.unwrap(made).__code__
