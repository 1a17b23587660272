"""What became of the mutants, as Markdown and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from mutants.catalogue import Exclusion, Mutant
from mutants.trial import Outcome

Result = tuple[Mutant, Outcome]
TABLE = (
    "| fault | source | verdict | law | examples | seconds |",
    "| --- | --- | --- | --- | --- | --- |",
)


def score(results: Sequence[Result]) -> str:
    """How many are killed, of how many."""
    killed = sum(outcome.verdict == "killed" for _, outcome in results)
    return f"{killed} of {len(results)}"


def by_family(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each family."""
    families = dict.fromkeys(mutant.family for mutant, _ in results)
    return {
        family: [result for result in results if result[0].family == family] for family in families
    }


def median_seconds(results: Sequence[Result]) -> float:
    """The median time to a kill; 0 where there is none."""
    times = [outcome.seconds for _, outcome in results if outcome.verdict == "killed"]
    return statistics.median(times) if times else 0.0


def markdown(results: Sequence[Result], excluded: Sequence[Exclusion], cores: int | None) -> str:
    """The report for people."""
    lines = [
        "# Planted faults and the tests that kill them",
        "",
        f"`nox -s mutants`: {score(results)} killed, median time to a kill {median_seconds(results):.1f} s on {cores} cores. "
        "Stages: the files that a fault names, all tests with ranks as threads, all tests under `mpiexec -n 4`.",
        "",
        "| class | killed |",
        "| --- | --- |",
        *(f"| {family} | {score(part)} |" for family, part in by_family(results).items()),
    ]
    for family, part in by_family(results).items():
        lines += ["", f"## {family}", "", *TABLE]
        lines += [_row(mutant, outcome) for mutant, outcome in part]
    lines += [
        "",
        "## Not planted",
        "",
        "| fault | reason |",
        "| --- | --- |",
        *(f"| {x.id} | {x.reason} |" for x in excluded),
    ]
    return "\n".join(lines) + "\n"


def _row(mutant: Mutant, outcome: Outcome) -> str:
    law = outcome.law.removeprefix("tests/").replace("|", "\\|") or outcome.words.replace(
        "|", "\\|"
    )
    verdict = (
        outcome.verdict
        if outcome.stage in ("", "chosen")
        else f"{outcome.verdict} ({outcome.stage})"
    )
    cells = (
        f"{mutant.id} {mutant.title}",
        mutant.source,
        verdict,
        law,
        outcome.examples or "",
        f"{outcome.seconds:.0f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def write(
    folder: Path, results: Sequence[Result], excluded: Sequence[Exclusion], cores: int | None
) -> None:
    """Write both reports into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mutants.md").write_text(markdown(results, excluded, cores))
    plain = [
        {"id": m.id, "family": m.family, "file": m.file, **outcome.as_dict()}
        for m, outcome in results
    ]
    (folder / "mutants.json").write_text(json.dumps(plain, indent=1) + "\n")
