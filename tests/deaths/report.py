"""Report how launches in which a rank was lost have ended, as Markdown and JSON, for both MPIs."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deaths.programs import BOUND, PLACES as PROGRAMS, STARTS
from deaths.trial import EXAMPLE_SECONDS, MORE_SECONDS, PHASE_SECONDS, RANKS
from deaths.ways import PLACES, WAYS
from studies.records import named, table, write

from benchmarks.checkout import commit

SHOWN_LINES = 80
Rows = dict[str, list[dict[str, Any]]]
HEAD = f"""# A rank is lost

`nox -s deaths`: in a launch of {RANKS} ranks one of them, drawn at random, is lost in one of the
ways below, at one of these points, from a random example on. Seconds: from the loss to the end of
everything. Limits in these launches: {EXAMPLE_SECONDS:g} s for an example, {PHASE_SECONDS:g} s for
anything else; the defaults are 30 and 300 (`SP_WATCHDOG_S`, `SP_WATCHDOG_PHASE_S`). Bound: that
limit and {MORE_SECONDS:g} s. If no rank dies, the seconds include the search for the smallest
example.

After each of them these are checked: the exit code is not 0; the report names the rank, the test,
the example, and a stack (the last place, where the process had no chance to write one); the results
of the tests before are in the JUnit file; no process and no file in shared memory is left.

In the last tables one of three ranks of a program fails at some place; a column for each launcher.
The exit code must not be 0. The report must name rank and cause, and everything must end within
{BOUND:g} s. A cell is empty if that launcher cannot learn of the failure.
"""


def add(folder: Path, library: str, kind: str, row: dict[str, Any], printed: str) -> int:
    """Print a row and add it to the report in a folder. Return the number of its faults.

    Args:
        folder: the folder of the report. Its rows stay until the same way and place are tried again
            with the same MPI.
        library: the MPI library of this run.
        kind: the kind of the row: "deaths", "faults" or "programs".
        row: the row to be added.
        printed: the text that the launch printed.
    """
    faults, file = row["faults"], folder / "deaths.json"
    said = " ".join(str(value) for value in row.values() if value is not faults)
    print(f"{said} {', '.join(faults) or 'ok'}", flush=True)
    if faults:
        print("-" * 20, *printed.splitlines()[-SHOWN_LINES:], "-" * 20, sep="\n", flush=True)
    everything: dict[str, Rows] = json.loads(file.read_text()) if file.exists() else {}
    mine = everything.setdefault(library, {})
    rows = {_key(old): old for old in mine.get(kind, [])}
    rows[_key(row)] = {**row, "commit": commit(), "cores": os.cpu_count()}
    mine[kind] = list(rows.values())
    write(folder, "deaths", markdown(everything), everything)
    return len(faults)


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("fault", "way", "place", "start") if name in row)


def markdown(everything: dict[str, Rows]) -> list[str]:
    """Return the lines of the report as Markdown."""
    lines = [HEAD]
    for library, told in everything.items():
        lines += [f"## {library}", "", _summary([row for rows in told.values() for row in rows])]
        lines += ["", *_crossed(told.get("deaths", []), "way", WAYS, "place", PLACES), ""]
        lines += table(
            ["fault", "smallest example found", "launches", "seconds", ""],
            (
                [
                    *(row["fault"], row["minimum"], row["launches"], f"{row['seconds']:.0f}"),
                    ", ".join(row["faults"]) or "as expected",
                ]
                for row in told.get("faults", [])
            ),
        )
        programs = _crossed(told.get("programs", []), "place", PROGRAMS, "start", STARTS)
        lines += ["", *programs, ""] if "programs" in told else [""]
    return lines


def _summary(rows: list[dict[str, Any]]) -> str:
    good = sum(not row["faults"] for row in rows)
    commits = ", ".join(sorted({named(row["commit"]) for row in rows}))
    return (
        f"{good} of {len(rows)} as they should be; {max(row['cores'] for row in rows)} cores; "
        f"commit {commits}."
    )


def _crossed(
    rows: list[dict[str, Any]], by: str, known: Iterable[str], over: str, heads: Iterable[str]
) -> list[str]:
    """Return a table of rows, with their values of `by` down and their values of `over` across."""
    cells = {(row[by], row[over]): _cell(row) for row in rows}
    used = [head for head in heads if any(head == there for _, there in cells)]
    named = [name for name in known if any(name == there for there, _ in cells)]
    return table([by, *used], ([x, *(cells.get((x, head), "") for head in used)] for x in named))


def _cell(row: dict[str, Any]) -> str:
    wrong = f" **{', '.join(row['faults'])}**" if row["faults"] else ""
    bound = f" (≤ {row['bound']:.0f})" if "bound" in row else ""
    return f"{row['seconds']:.1f}{bound}{wrong}"
