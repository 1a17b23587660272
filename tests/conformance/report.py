"""What was found, as a table on the terminal, as Markdown, and as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from conformance.launching import EXAMPLE_SECONDS
from conformance.libraries import SUBJECTS, Library
from conformance.trial import CELL_SECONDS

STYLES = {
    "pass": "green",
    "refused": "yellow",
    "not offered": "dim",
    "wrong": "bold red",
    "hung": "bold magenta",
    "crashed": "bold magenta",
    "slow": "magenta",
    "not installed": "dim",
    "not tried": "dim",
}
"""Every verdict and how it looks."""
NO_RESULT = ("hung", "crashed", "slow")
SCHEMA = 2
FORWARD_ONLY = {name for subject in SUBJECTS.values() for name in subject.FORWARD_ONLY}
Verdicts = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By library and capability."""


def document(
    libraries: Sequence[Library],
    versions: Mapping[str, str],
    verdicts: Verdicts,
    planted: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    examples: int,
) -> dict[str, Any]:
    """Return everything as plain data; each column says which run it is of, and which adapter."""
    columns = [
        {
            "name": one.name,
            "about": one.about,
            "package": one.package,
            "version": versions[one.name],
        }
        | {"examples": examples, "adapter_sha256": digest(one)}
        for one in libraries
    ]
    return {
        "schema_version": SCHEMA,
        "libraries": [{**column, "run": dict(run)} for column in columns],
        "verdicts": dict(verdicts),
        "planted": list(planted),
    }


def digest(library: Library) -> str:
    """Return the SHA-256 of the file that says how a library is called."""
    file = Path(__file__).parent / "adapters" / f"{library.adapter}.py"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read(folder: Path) -> dict[str, Any]:
    """Return the report in a folder; nothing where there is none of this version."""
    file = folder / "REPORT.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found if found.get("schema_version") == SCHEMA else {}


def known_cells(
    report: Mapping[str, Any], names: Sequence[str]
) -> dict[tuple[str, str], dict[str, Any]]:
    """What a report says that was tried, of some libraries."""
    columns = {
        name: report["verdicts"][name] for name in names if name in report.get("verdicts", {})
    }
    return {
        (name, cell): v
        for name, column in columns.items()
        for cell, v in column.items()
        if "examples" in v
    }


def joined(old: Mapping[str, Any], new: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """A report with the columns of another that it does not have itself."""
    columns = {column["name"]: column for part in (old, new) for column in part["libraries"]}
    here = [name for name in order if name in columns]
    verdicts = {**old["verdicts"], **new["verdicts"]}
    planted = [one for one in old["planted"] if one["library"] not in new["verdicts"]] + new[
        "planted"
    ]
    return {
        **new,
        "libraries": [columns[name] for name in here],
        "verdicts": {name: verdicts[name] for name in here},
        "planted": sorted(planted, key=lambda one: order.index(one["library"])),
    }


def short(verdict: Mapping[str, Any]) -> str:
    """One cell: the verdict, and of how many problems."""
    name, examples = verdict["verdict"], verdict.get("examples", 0)
    if name == "pass":
        forward = not verdict["gradients"] and verdict["capability"] not in FORWARD_ONLY
        return f"pass {examples}" + ", forward" * forward
    if name == "slow":
        return f"slow, P {verdict['ranks'][-1]}" + f"; right in {examples}" * bool(examples)
    if name == "refused" and 0 < verdict.get("refused", 0) < examples:
        return f"refused {verdict['refused']} of {examples}"
    if name == "wrong" and verdict["relative"] is not None:
        return f"wrong {verdict['result']} {verdict['relative']:.0e}"
    return str(name)


def _columns(document: Mapping[str, Any], about: str) -> list[dict[str, Any]]:
    return [column for column in document["libraries"] if column["about"] == about]


def tables(document: Mapping[str, Any]) -> list[Table]:
    """Make a table for each subject: capabilities down, libraries across."""
    found = []
    for about, subject in SUBJECTS.items():
        shown = Table(title=f"conformance: {about}", title_justify="left", show_lines=False)
        shown.add_column("")
        columns = _columns(document, about)
        for column in columns:
            shown.add_column(f"{column['name']}\n{column['version']}", overflow="fold")
        for capability in subject.CAPABILITIES:
            row = [document["verdicts"][column["name"]][capability] for column in columns]
            shown.add_row(capability, *(f"[{STYLES[v['verdict']]}]{short(v)}[/]" for v in row))
        found += [shown] * bool(columns)
    return found


def _runs(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the runs that columns are of, the oldest first."""
    found: list[dict[str, Any]] = []
    for column in document["libraries"]:
        found += [column["run"]] * (column["run"] not in found)
    return sorted(found, key=lambda run: str(run["date"]))


def markdown(document: Mapping[str, Any]) -> str:
    """The report for people."""
    runs = _runs(document)
    examples = max(column["examples"] for column in document["libraries"])
    lines = [
        "# Other libraries under the laws of our own",
        "",
        f"`nox -s conformance`: up to {examples} problems for each cell and number of ranks, over",
        f"gloo. {CELL_SECONDS:g} s times the run's patience after its first problem a cell begins no other.",
        "",
        "`pass n`: right in all n problems; forward and backward, but full, causal and forward without gradients, and where plain",
        "gradients are not right or not there `forward`.",
        "`refused`: an error on every rank, or the documentation says so. `not offered`: the call has no place for it. `wrong`:",
        "which result, and its relative error in the smallest problem found. `hung`, `crashed`: some ranks wait for ever, or die.",
        f"`slow`: no rank waits, but after {EXAMPLE_SECONDS} s times the run's patience all still compute one small problem.",
        "Each library is called as its documentation says; how stands at the top of its file in `tests/conformance/adapters`.",
        "One that calls flash-attn gets an exact stand-in (`flash_standin.py`), so what is judged is the library alone.",
        "Two libraries refuse on a CPU before they compute. Each has a second column, `CPU stand-in`, where one answer about the",
        "device is replaced; its file says which.",
        "",
        "![The same as a picture](REPORT.png)",
        "",
        "| run | date | commit | seconds | patience | machine |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {number} | {run['date']} | {_commit(run)} | {run['seconds']} | {run['patience']:g} | {_machine(run)} |"
            for number, run in enumerate(runs, 1)
        ),
    ]
    for about in SUBJECTS:
        lines += _matrix(document, about, runs)
    for title, names in {
        "Wrong": ("wrong",),
        "Hung, crashed or slow": NO_RESULT,
        "Refused": ("refused", "not offered"),
    }.items():
        lines += ["", f"## {title}", "", *(_details(document, names) or ["Nothing."])]
    lines += [
        "",
        "## Planted faults",
        "",
        "A function of the library was replaced by a wrong one; the column must see it.",
        "",
    ]
    lines += ["| library | capability | fault | verdict |", "| --- | --- | --- | --- |"]
    for one in document["planted"]:
        lines.append(
            f"| {one['library']} | {one['capability']} | {one['what']} | {short({**one, 'gradients': True})} |"
        )
    return "\n".join(lines) + "\n"


def _matrix(
    document: Mapping[str, Any], about: str, runs: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Make the table of a subject: capabilities down, libraries across."""
    verdicts, columns = document["verdicts"], _columns(document, about)
    if not columns:
        return []
    rows = {
        "version": [c["version"] for c in columns],
        "run": [str(runs.index(c["run"]) + 1) for c in columns],
    }
    rows |= {"numbers of ranks": [_ranks(verdicts[c["name"]]) for c in columns]}
    rows |= {"problems at most": [str(c["examples"]) for c in columns]}
    rows |= {
        f"{capability}: {meaning}": [short(verdicts[c["name"]][capability]) for c in columns]
        for capability, meaning in SUBJECTS[about].CAPABILITIES.items()
    }
    lines = ["", f"## {about.capitalize()}", "", f"| | {' | '.join(c['name'] for c in columns)} |"]
    return [
        *lines,
        f"| --- |{' --- |' * len(columns)}",
        *(f"| {name} | {' | '.join(row)} |" for name, row in rows.items()),
    ]


def _ranks(column: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(
        map(str, sorted({size for verdict in column.values() for size in verdict.get("ranks", ())}))
    )


def _commit(run: Mapping[str, Any]) -> str:
    """Name the code of a run; runs of before this was recorded have none."""
    commit = run.get("commit", {"sha": None})
    return (
        "not recorded"
        if commit["sha"] is None
        else commit["sha"][:10] + " with changes" * bool(commit["dirty"])
    )


def _machine(run: Mapping[str, Any]) -> str:
    return (
        f"{run['cores']} cores, Python {run['python']}, torch {run['torch']} on CPU, {run['mpi']}"
    )


def _details(document: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    found = [
        (column, capability, verdict)
        for column in document["libraries"]
        for capability, verdict in document["verdicts"][column["name"]].items()
        if verdict["verdict"] in names
    ]
    if not found:
        return []
    heads = {
        "wrong": "smallest problem | error | by its script",
        "hung": "problem | what the ranks did | by its script",
    }
    head = heads.get(names[0], "why | source")
    lines = [
        f"| library | capability | {head} |",
        f"| --- | --- |{' --- |' * (head.count('|') + 1)}",
    ]
    return lines + [
        f"| {c['name']} | {name} | {' | '.join(_cells(c['about'], verdict))} |"
        for c, name, verdict in found
    ]


def _cells(about: str, verdict: Mapping[str, Any]) -> list[str]:
    """What is told of one cell."""
    subject = SUBJECTS[about]
    problem = subject.smallest(subject.posed(verdict["problem"])) if "problem" in verdict else "-"
    alone = verdict.get("alone", "not tried") + (
        f"; {verdict['known']}" if "known" in verdict else ""
    )
    if verdict["verdict"] == "wrong":
        relative = "not finite" if verdict["relative"] is None else f"{verdict['relative']:.2g}"
        where = f"{verdict['result']} of rank {verdict['rank']}: {relative}"
        return [problem, where, _escaped(alone)]
    if verdict["verdict"] in NO_RESULT:
        return [problem, _escaped(verdict["states"]), _escaped(alone)]
    return [_escaped(verdict.get("text", "")), _escaped(verdict.get("source", "tried"))]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")[:300]


def write(folder: Path, document: Mapping[str, Any]) -> None:
    """Write the Markdown and the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "REPORT.md").write_text(markdown(document))
    (folder / "REPORT.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
