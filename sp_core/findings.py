"""Hold what `sp-core doctor` finds, join the findings of all ranks, and make its report."""

import shutil
from dataclasses import dataclass, replace
from textwrap import TextWrapper
from typing import Any, Literal

PIPE_COLUMNS = 10_000  # do not wrap lines that are written to a file


@dataclass(frozen=True)
class Finding:
    """Hold one line of the report of `sp-core doctor`.

    Args:
        subject: the examined part, such as "MPI" or "transport host".
        status: "ok", "note" (no fault, but the user should know it) or "broken".
        text: a description of what was found.
        remedy: what the user must do if `status` is "broken".
    """

    subject: str
    status: Literal["ok", "note", "broken"]
    text: str
    remedy: str = ""


def of_all(mine: list[Finding], comm: Any) -> list[Finding]:
    """Return the findings of rank 0, then those of other ranks that are broken.

    Every rank calls this, with its own findings. Constants of other ranks are left out: a mesh
    reads SP_TUNING on rank 0 only. Of ranks that found the same, the first one is named.
    """
    first, *others = comm.allgather(mine)
    broken = {
        one: replace(one, text=f"rank {rank}: {one.text}")
        for rank, found in reversed([*enumerate(others, 1)])
        for one in found
        if one.status == "broken" and one.subject != "SP_TUNING" and one not in first
    }
    return [*first, *broken.values()]


def report(findings: list[Finding]) -> str:
    """Return the findings as a table folded to the terminal's width, followed by the remedies."""
    width = max(len(finding.subject) for finding in findings)
    fold = TextWrapper(
        width=shutil.get_terminal_size((PIPE_COLUMNS, PIPE_COLUMNS)).columns,
        subsequent_indent=" " * (width + 10),
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = [fold.fill(f"{f.subject:<{width}}  {f.status:<6}  {f.text}") for f in findings]
    broken = [f for f in findings if f.status == "broken"]
    lines += ["", f"{len(broken)} broken:" if broken else "nothing is broken"]
    return "\n".join([*lines, *(f"  {f.subject}: {f.remedy}" for f in broken)])
