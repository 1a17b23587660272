"""What was found, as a table on the terminal, as Markdown, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from conformance.capabilities import CAPABILITIES, posed, smallest
from conformance.launching import EXAMPLE_SECONDS
from conformance.libraries import Library

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
SCHEMA = 1
Verdicts = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By library and capability."""


def document(
    libraries: Sequence[Library],
    versions: Mapping[str, str],
    verdicts: Verdicts,
    machine: Mapping[str, Any],
    setting: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything as plain data."""
    columns = [{"name": one.name, "package": one.package, "version": versions[one.name], **setting} for one in libraries]
    return {"schema_version": SCHEMA, "machine": dict(machine), "libraries": columns, "verdicts": dict(verdicts)}


def read(folder: Path) -> dict[str, Any]:
    """The report in a folder; nothing where there is none."""
    file = folder / "REPORT.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def known_cells(report: Mapping[str, Any], names: Sequence[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """What a report says that was tried, of some libraries."""
    columns = {name: report["verdicts"][name] for name in names if name in report.get("verdicts", {})}
    return {(name, cell): v for name, column in columns.items() for cell, v in column.items() if "examples" in v}


def joined(old: Mapping[str, Any], new: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """A report with the columns of another that it does not have itself."""
    columns = {column["name"]: column for part in (old, new) for column in part["libraries"]}
    here = [name for name in order if name in columns]
    verdicts = {**old["verdicts"], **new["verdicts"]}
    return {**new, "libraries": [columns[name] for name in here], "verdicts": {name: verdicts[name] for name in here}}


def short(verdict: Mapping[str, Any]) -> str:
    """One cell: the verdict, and of how many problems."""
    name, examples = verdict["verdict"], verdict.get("examples", 0)
    if name == "pass":
        forward = not verdict["gradients"] and verdict["capability"] not in ("full", "causal")
        return f"pass {examples}" + ", forward" * forward
    if name == "slow":
        return f"slow, P {verdict['ranks'][-1]}" + f"; right in {examples}" * bool(examples)
    if name == "refused" and 0 < verdict.get("refused", 0) < examples:
        return f"refused {verdict['refused']} of {examples}"
    if name == "wrong" and verdict["relative"] is not None:
        return f"wrong {verdict['result']} {verdict['relative']:.0e}"
    return str(name)


def table(document: Mapping[str, Any]) -> Table:
    """Capabilities down, libraries across."""
    shown = Table(title="conformance", title_justify="left", show_lines=False)
    shown.add_column("")
    for column in document["libraries"]:
        shown.add_column(f"{column['name']}\n{column['version']}", overflow="fold")
    for capability in CAPABILITIES:
        row = [document["verdicts"][column["name"]][capability] for column in document["libraries"]]
        shown.add_row(capability, *(f"[{STYLES[v['verdict']]}]{short(v)}[/]" for v in row))
    return shown


def markdown(document: Mapping[str, Any]) -> str:
    """The report for people."""
    columns, verdicts, machine = document["libraries"], document["verdicts"], document["machine"]
    sizes = sorted({size for column in verdicts.values() for verdict in column.values() for size in verdict.get("ranks", ())})
    examples = min(column["examples"] for column in columns)
    lines = [
        "# Other libraries under the laws of our schemes",
        "",
        f"`nox -s conformance`: {examples} problems for each cell and number of ranks ({', '.join(map(str, sizes))}), over gloo;",
        f"{machine['cores']} cores, Python {machine['python']}, torch {machine['torch']} on CPU, {machine['mpi']}.",
        "",
        "`pass n`: right in all n problems; forward and backward, but full and causal forward alone, and where plain gradients are",
        "not right or not there `forward`.",
        "`refused`: an error on every rank, or the documentation says so. `not offered`: the call has no place for it. `wrong`:",
        "which result, and its relative error in the smallest problem found. `hung`, `crashed`: some ranks wait for ever, or die.",
        f"`slow`: no rank waits, but after {EXAMPLE_SECONDS} s on this machine all still compute one small problem.",
        "Each library is called as its documentation says; how stands at the top of its file in `tests/conformance/adapters`.",
        "One that calls flash-attn gets an exact stand-in (`flash_standin.py`), so what is judged is the library alone.",
        "",
        "![The same as a picture](REPORT.png)",
        "",
        f"| | {' | '.join(column['name'] for column in columns)} |",
        f"| --- |{' --- |' * len(columns)}",
        f"| version | {' | '.join(str(column['version']) for column in columns)} |",
    ]
    for capability, meaning in CAPABILITIES.items():
        cells = (short(verdicts[column["name"]][capability]) for column in columns)
        lines.append(f"| {capability}: {meaning} | {' | '.join(cells)} |")
    for title, names in (
        ("Wrong", ("wrong",)),
        ("Hung, crashed or slow", NO_RESULT),
        ("Refused", ("refused", "not offered")),
    ):
        lines += ["", f"## {title}", "", *(_details(document, names) or ["Nothing."])]
    return "\n".join(lines) + "\n"


def _details(document: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    found = [
        (column["name"], capability, verdict)
        for column in document["libraries"]
        for capability, verdict in document["verdicts"][column["name"]].items()
        if verdict["verdict"] in names
    ]
    if not found:
        return []
    heads = {"wrong": "smallest problem | error | by its script", "hung": "problem | what the ranks did | by its script"}
    head = heads.get(names[0], "why | source")
    lines = [f"| library | capability | {head} |", f"| --- | --- |{' --- |' * (head.count('|') + 1)}"]
    return lines + [f"| {library} | {capability} | {' | '.join(_cells(verdict))} |" for library, capability, verdict in found]


def _cells(verdict: Mapping[str, Any]) -> list[str]:
    """What is told of one cell."""
    problem = smallest(posed(verdict["problem"])) if "problem" in verdict else "-"
    alone = verdict.get("alone", "not tried") + (f"; {verdict['known']}" if "known" in verdict else "")
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
