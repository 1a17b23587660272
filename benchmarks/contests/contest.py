"""The driver of all contests: launches are data, and so are their records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import launching
from benchmarks.files import write_json
from benchmarks.launching import ROOT, Launch, Record, UsageError, commit
from benchmarks.reporting import terminal
from benchmarks.reporting.terminal import Console
from sp_core.machine import busy_share

SCHEMA_VERSION = 2
RESULTS = ROOT / "benchmarks" / "results"
INTERRUPTED = 130


@dataclass(frozen=True)
class Entry:
    """One launch.

    Args:
        name: for people.
        ranks: how many.
        measure: "module:function" that each rank calls.
        setting: its argument.
        launch: how ranks are started.
        about: part of the record that is known before.
    """

    name: str
    ranks: int
    measure: str
    setting: Any
    launch: Launch = field(default_factory=Launch)
    about: Record = field(default_factory=dict)

    def run(self) -> Record:
        """Start the ranks and return their record."""
        return launching.run(self.ranks, self.measure, self.setting, self.launch)


Show = Callable[["Console", Record], Iterable[str]]
"""Prints the tables of a document, and returns complaints about it."""


def new_document(**about: Any) -> Record:
    """Return a document without launches."""
    return {
        "schema_version": SCHEMA_VERSION,
        "commit": commit(),
        "busy_before": busy_share(),
        **about,
        "launches": [],
    }


def compete(
    name: str, entries: Iterable[Entry], document: Record, out: Path | None, show: Show
) -> int:
    """Run launches one after the other, write the document after each of them, and show its tables.

    Args:
        name: of the program, in front of complaints.
        entries: the launches.
        document: `new_document`, or one that goes on.
        out: file for the document.
        show: prints it.

    Returns:
        The exit code: 0, 1 if a launch failed or something is wrong, 130 after an interruption.
    """
    screen, interrupted = terminal.console(), False
    try:
        for entry in entries:
            record = {"name": entry.name, **entry.about, **entry.run()}
            document["launches"].append(record)
            terminal.say(
                screen,
                f"{name}: {entry.name}: {record['status']}, {record.get('took_s', 0.0):.0f} s",
            )
            if record["status"] != "ok":
                terminal.say(
                    screen, "\n".join(filter(None, (record["reason"], record.get("output")))), "red"
                )
            if out is not None:
                write_json(out, document)
    except KeyboardInterrupt:
        interrupted = True
        print(f"\n{name}: interrupted; what is complete follows.", file=sys.stderr)
    done = {
        **document,
        "launches": [record for record in document["launches"] if record["status"] == "ok"],
    }
    wrong = (
        list(show(screen, done))
        if done["launches"]
        else [f"{name}: no launch was completed; nothing to show."]
    )
    for text in wrong:
        terminal.say(screen, text, "red")
    return (
        INTERRUPTED
        if interrupted
        else int(bool(wrong) or len(done["launches"]) < len(document["launches"]))
    )


def refused(name: str, error: UsageError) -> int:
    """Say why options cannot be run. Return the exit code."""
    print(f"{name}: {error}", file=sys.stderr)
    return 2
