"""Make the report of all verdicts, as plain data for JSON, as Markdown and as a picture."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.records import named, table

from conformance.launching import EXAMPLE_SECONDS
from conformance.libraries import SUBJECTS, Library
from conformance.trial import CELL_SECONDS

NO_RESULT = ("hung", "crashed", "slow")
SCHEMA = 2
FORWARD_ONLY = {name for subject in SUBJECTS.values() for name in subject.FORWARD_ONLY}
COLOURS = {
    "pass": "#3a9d5d",
    "refused": "#e9c46a",
    "not offered": "#e8e8e8",
    "wrong": "#d1495b",
    "hung": "#7b2d8b",
    "crashed": "#7b2d8b",
    "slow": "#f4a261",
    "not installed": "#ffffff",
    "not tried": "#ffffff",
}
SIGNS = {
    "pass": "\N{CHECK MARK}",
    "refused": "no",
    "not offered": "",
    "wrong": "wrong",
    "hung": "hung",
    "crashed": "crash",
    "slow": "slow",
}
Verdicts = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""The verdicts by library and capability."""


def document(
    libraries: Sequence[Library],
    versions: Mapping[str, str],
    verdicts: Verdicts,
    planted: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    examples: int,
) -> dict[str, Any]:
    """Return the report as plain data; each column records its run and its adapter's digest."""
    columns = [
        {
            "name": one.name,
            "about": one.about,
            "package": one.package,
            "version": versions[one.name],
            "examples": examples,
            "adapter_sha256": digest(one),
            "run": dict(run),
        }
        for one in libraries
    ]
    found = {"verdicts": dict(verdicts), "planted": list(planted)}
    return {"schema_version": SCHEMA, "libraries": columns, **found}


def digest(library: Library) -> str:
    """Return the SHA-256 of a library's adapter file."""
    file = Path(__file__).parent / "adapters" / f"{library.adapter}.py"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read(folder: Path) -> dict[str, Any]:
    """Return the report in a folder, or an empty dict if there is none with this schema version."""
    file = folder / "REPORT.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found if found.get("schema_version") == SCHEMA else {}


def joined(old: Mapping[str, Any], new: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return the new report with those columns of the old one that it lacks, in a given order."""
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
    """Return the text of a cell: the verdict, and the number of problems or the error."""
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


def _runs(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the different runs of all columns, the oldest first."""
    found: list[dict[str, Any]] = []
    for column in document["libraries"]:
        found += [column["run"]] * (column["run"] not in found)
    return sorted(found, key=lambda run: str(run["date"]))


HEAD = Path(__file__).with_name("head.txt").read_text()
LISTS = {
    "Wrong": (("wrong",), ("smallest problem", "error", "by its script")),
    "Hung, crashed or slow": (NO_RESULT, ("problem", "what the ranks did", "by its script")),
    "Refused": (("refused", "not offered"), ("why", "source")),
}


def markdown(document: Mapping[str, Any]) -> list[str]:
    """Return the lines of the report."""
    runs = _runs(document)
    examples = max(column["examples"] for column in document["libraries"])
    asked = f"`nox -s conformance`: up to {examples} problems for each cell and number of ranks, "
    asked += HEAD.format(cell=CELL_SECONDS, example=EXAMPLE_SECONDS)
    head = ("run", "date", "commit", "seconds", "patience", "machine")
    rows = [
        (
            n,
            r["date"],
            named(r["commit"]) if "commit" in r else "not recorded",
            r["seconds"],
            f"{r['patience']:g}",
            f"{r['cores']} cores, Python {r['python']}, torch {r['torch']} on CPU, {r['mpi']}",
        )
        for n, r in enumerate(runs, 1)
    ]
    lines = ["# Other libraries under the laws of our own", "", asked, *table(head, rows)]
    for about in SUBJECTS:
        lines += _matrix(document, about, runs)
    for title, (names, words) in LISTS.items():
        found = [
            (column["name"], capability, *_cells(column["about"], verdict))
            for column in document["libraries"]
            for capability, verdict in document["verdicts"][column["name"]].items()
            if verdict["verdict"] in names
        ]
        told = table(("library", "capability", *words), found) if found else ["Nothing."]
        lines += ["", f"## {title}", "", *told]
    said = "A function of the library was replaced by a wrong one; the column must see it."
    planted = [
        (one["library"], one["capability"], one["what"], short({**one, "gradients": True}))
        for one in document["planted"]
    ]
    faults = table(("library", "capability", "fault", "verdict"), planted)
    return [*lines, "", "## Planted faults", "", said, "", *faults]


def _matrix(
    document: Mapping[str, Any], about: str, runs: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Make the table of a subject: a row for each capability, a column for each library."""
    columns = [column for column in document["libraries"] if column["about"] == about]
    verdicts = [document["verdicts"][column["name"]] for column in columns]
    if not columns:
        return []
    rows = [
        ("version", *(column["version"] for column in columns)),
        ("run", *(runs.index(column["run"]) + 1 for column in columns)),
        ("numbers of ranks", *map(_ranks, verdicts)),
        ("problems at most", *(column["examples"] for column in columns)),
    ]
    rows += [
        (f"{capability}: {meaning}", *(short(column[capability]) for column in verdicts))
        for capability, meaning in SUBJECTS[about].CAPABILITIES.items()
    ]
    told = table(("", *(column["name"] for column in columns)), rows)
    return ["", f"## {about.capitalize()}", "", *told]


def _ranks(column: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(
        map(str, sorted({size for verdict in column.values() for size in verdict.get("ranks", ())}))
    )


def _cells(about: str, verdict: Mapping[str, Any]) -> list[str]:
    """Return the texts of a cell's row in its list: the problem or reason, and what happened."""
    problem = SUBJECTS[about].smallest(verdict["problem"]) if "problem" in verdict else "-"
    alone = verdict.get("alone", "not tried") + (
        f"; {verdict['known']}" if "known" in verdict else ""
    )
    if verdict["verdict"] == "wrong":
        relative = "not finite" if verdict["relative"] is None else f"{verdict['relative']:.2g}"
        return [problem, f"{verdict['result']} of rank {verdict['rank']}: {relative}", alone[:300]]
    if verdict["verdict"] in NO_RESULT:
        return [problem, verdict["states"][:300], alone[:300]]
    return [verdict.get("text", "")[:300], verdict.get("source", "tried")[:300]]


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: a table for each subject, a row for each library, cells coloured by verdict."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns: dict[str, list[str]] = {}  # a report of some libraries may lack a subject
    for column in document["libraries"]:
        columns.setdefault(column["about"], []).append(column["name"])
    heights = [2 + len(names) for names in columns.values()]
    figure = Figure(figsize=(14, 0.3 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), height_ratios=heights, squeeze=False)
    seen = set()
    for axes, (about, names) in zip(panels[:, 0], columns.items(), strict=True):
        capabilities = list(SUBJECTS[about].CAPABILITIES)
        found = [document["verdicts"][name] for name in names]
        cells = [[column[name]["verdict"] for name in capabilities] for column in found]
        seen |= {verdict for row in cells for verdict in row}
        axes.axis("off")
        axes.table(
            [[SIGNS.get(verdict, "?") for verdict in row] for row in cells],
            cellColours=[[COLOURS[verdict] for verdict in row] for row in cells],
            cellLoc="center",
            rowLabels=names,
            colLabels=capabilities,
            bbox=(0, 0, 1, 1),
        )
    shown = [verdict for verdict in SIGNS if verdict in seen]
    handles = [Patch(color=COLOURS[verdict], label=verdict) for verdict in shown]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150)
