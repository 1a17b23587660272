"""Compare messages, bytes and memory of a fixed list of cases with `counters.json`, without timing.

Ranks are threads of this process. Ranks under mpiexec give the same numbers (tests/test_counters.py
runs it both ways). A change that alters a number must also alter the table, by `--write`, so that a
reviewer sees it.
"""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from benchmarks.cases import bench_collectives, bench_layers, bench_llama, bench_schemes
from benchmarks.cases.case import CONTROL, Watched, counts_of, meshes
from benchmarks.cases.setting import module_of
from benchmarks.launching import about, parse
from benchmarks.records import Case
from benchmarks.sample import peak_memory, undisturbed
from sp_core.testing import run_threads

TABLE = Path(__file__).with_name("counters.json")
SIZES = (1, 2, 3, 4)
ELEMENTS = min(bench_collectives.ELEMENTS)
ATTENTION = {"batch": 1, "seq": 48, "heads": 4, "kv_heads": 2, "head_dim": 8}
BLOCK = {"batch": 1, "seq": 48, "hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 64}
MODEL = {
    "layers": 2,
    "seq": 12,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn": 64,
    "vocab": 48,
}
SECONDS = 120.0
OPTIONS = {"--write": about(action="store_true", help="make the table say what was counted")}
Entry = dict[str, Any]
Table = dict[str, Entry]
"""An entry for each "CASE P=RANKS"."""


def chosen(ranks: int) -> list[Case]:
    """Return the cases of the table for this number of ranks, all of small sizes."""
    # the peak of those in a window depends on which rank is late
    attention = [
        case
        for case in bench_schemes.cases(ranks, shape=ATTENTION)
        if case.transport != bench_schemes.WINDOW
    ]
    both = [*attention, *bench_layers.cases(ranks, shape=BLOCK)]
    llama = bench_llama.cases(ranks, shape=MODEL)
    return [
        *(one for one in bench_collectives.cases(ranks) if one.shape["elements"] == ELEMENTS),
        *(one for one in attention if one.direction != "both" and bench_schemes.quick(one)),
        *(one for one in both if one.direction == "both"),
        *(one for one in llama if one.algorithm == bench_llama.LIBRARY),
    ]


def count(cases: Sequence[Case], comm: Any) -> Table:
    """Count messages, bytes and memory of one step of each case; the result is equal on all ranks.

    Args:
        cases: the cases, whose number of ranks is that of `comm`.
        comm: an mpi4py communicator, or one whose ranks are threads.
    """
    return {
        f"{case.id} P={case.ranks}": _entry(comm.allgather(_one_rank(case, comm))) for case in cases
    }


def differences(found: Table, table: Table) -> list[str]:
    """Return a line for each difference, as "case P=p: what: table -> found"."""
    told = [f"{name}: no longer measured" for name in table if name not in found]
    told += [f"{name}: not in the table" for name in found if name not in table]
    for name in sorted({*found} & {*table}):
        was, now = table[name], found[name]
        fields = [field for field in sorted({*was, *now}) if was.get(field) != now.get(field)]
        told += [f"{name}: {field}: {was.get(field)} -> {now.get(field)}" for field in fields]
    return told


def load() -> Table:
    """Read the committed table."""
    return cast("Table", json.loads(TABLE.read_text()))


def text(table: Table) -> str:
    """Return the table as JSON with one line for each case and P, which makes a diff readable."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}"
        for name, entry in sorted(table.items())
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare or write the table. Return 0 if it is exact or written, 1 if something differs."""
    options = parse("counters", __doc__, OPTIONS, arguments)
    os.environ["SP_TUNING"] = "off"  # the table must not depend on earlier measurements
    found: Table = {}
    for cases in map(chosen, SIZES):
        with undisturbed():  # a cycle collected in the middle of a step would change its peak
            found |= run_threads(cases[0].ranks, partial(count, cases), timeout=SECONDS)[0]
    told = differences(found, load() if TABLE.exists() else {})
    print("\n".join([*told, f"{len(found)} entries, {len(told)} differences from {TABLE.name}"]))
    if options.write:
        TABLE.write_text(text(found))
        return 0
    if told:
        print("If this is meant, run it with --write and commit the table.", file=sys.stderr)
    return 1 if told else 0


def _one_rank(case: Case, comm: Any) -> Entry:
    import torch

    if case.transport != bench_collectives.WINDOW:
        case = replace(case, transport="auto")  # how messages travel is not what is counted here
    with meshes(case, comm, torch.device("cpu")) as mesh:
        work = module_of(case.layer).build(case, mesh, lambda: None)
        work.step()  # the first step makes the buffers that later steps use again
        watched = [Watched(member) for member in work.phases.comms]
        for member in work.phases.comms:
            member.counters.reset()
        peak, _ = peak_memory(work.step, work.held, mesh.device)
        counts = counts_of(work.phases.comms)
        return {
            "bytes_sent": sum(
                count.bytes_sent for name, count in counts.items() if name != CONTROL
            ),
            "calls": {name: count.calls for name, count in sorted(counts.items())},
            "messages": sum(count.messages for count in counts.values()),
            "largest_message": max((w.largest for w in watched), default=0),
            "peak_bytes": peak,
        }


def _entry(by_rank: list[Entry]) -> Entry:
    """Return each number once if all ranks have the same, else as a list by rank."""
    together = {name: [rank[name] for rank in by_rank] for name in by_rank[0]}
    return {
        name: values[0] if all(v == values[0] for v in values) else values
        for name, values in together.items()
    }
