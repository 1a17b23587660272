"""Hold what `sp-core doctor` finds, join the findings of all ranks, and make its report."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

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


def of_all_ranks(mine: list[Finding], comm: Intracomm | None) -> list[Finding]:
    """Return the findings of rank 0, and what is broken on other ranks only. Every rank calls this.

    Args:
        mine: the findings of this rank.
        comm: the ranks; None if there is only this process.

    Returns:
        The same list on all ranks. Of ranks with the same fault the first one is named.
    """
    told = [mine] if comm is None else comm.allgather(mine)
    first: dict[Finding, int] = {}
    for rank, found in enumerate(told):
        first |= {one: rank for one in found if one not in first}
    return told[0] + [
        replace(one, text=f"rank {rank}: {one.text}")
        for one, rank in first.items()
        if rank and one.status == "broken"
    ]


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
