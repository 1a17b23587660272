"""What is derived from the records of an experiment, and how it is shown: a table and a plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Record = dict[str, Any]
DASH = "-"
COLUMNS = (
    "P",
    "time (ms)",
    "speed-up",
    "efficiency",
    "tokens/s",
    "comm share",
    "ms/AllGather",
    "GB/s",
    "peak memory",
    "max error",
    "",
)


@dataclass(frozen=True)
class Row:
    """The numbers of one record that came out well.

    Args:
        ranks: P.
        milliseconds: median time of a step.
        speedup: time of the fewest ranks over this time.
        efficiency: speed-up over the growth in ranks.
        tokens_per_s: tokens of the whole sequence and batch, per second.
        share: of the step that was communication.
        gather_ms, gb_per_s: of one K/V AllGather; None for a single rank.
        peak_bytes: live tensors of the rank that had most.
        error: max |ranks - single device|.
        flags: why to read the row with care.
    """

    ranks: int
    milliseconds: float
    speedup: float
    efficiency: float
    tokens_per_s: float
    share: float
    gather_ms: float | None
    gb_per_s: float | None
    peak_bytes: int
    error: float
    flags: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        """The text of each column."""
        return (
            str(self.ranks),
            f"{self.milliseconds:.1f}",
            f"{self.speedup:.2f}",
            f"{self.efficiency:.0%}",
            f"{self.tokens_per_s:,.0f}",
            f"{self.share:.1%}",
            DASH if self.gather_ms is None else f"{self.gather_ms:.3f}",
            DASH if self.gb_per_s is None else f"{self.gb_per_s:.2f}",
            _bytes(self.peak_bytes),
            f"{self.error:.1e}",
            ", ".join(self.flags),
        )


def rows(records: list[Record]) -> list[Row]:
    """A row for each record with status "ok", by number of ranks; speed-up is against the fewest ranks among them."""
    good = sorted((r for r in records if r["status"] == "ok"), key=lambda r: r["case"]["ranks"])
    return [_row(record, good[0]) for record in good]


def table(records: list[Record]) -> Table:
    """All records of one dtype: a line for each, a failed one with its reason."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, title=title(records), title_justify="left", title_style="bold")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == "" else "right", no_wrap=True)
    lines = {row.ranks: (row.cells(), "") for row in rows(records)}
    lines |= {r["case"]["ranks"]: (_failed_cells(r), "red") for r in records if r["status"] not in ("ok", "wrong")}
    for _, (cells, style) in sorted(lines.items()):
        shown.add_row(*cells, style=style)
    return shown


def title(records: list[Record]) -> str:
    """What was computed, in one line."""
    case = records[0]["case"]
    heads = f"{case['heads']} heads of {case['head_dim']}"
    if case["kv_heads"] != case["heads"]:
        heads += f" ({case['kv_heads']} key/value heads)"
    return (
        f"{case['dtype']} on {case['device']}: hidden {case['hidden']}, {heads}, feed-forward {case['ffn']}, "
        f"sequence {case['seq']}, batch {case['batch']}, {'causal' if case['causal'] else 'not causal'}, {case['layout']}"
    )


def legend(records: list[Record]) -> str:
    """How to read the table."""
    base = min((r["case"]["ranks"] for r in records if r["status"] == "ok"), default=1)
    threads = next((r["transport"]["threads"] for r in records if r["status"] == "ok"), 1)
    return (
        f"time: median over the iterations, last rank's end minus first rank's start. speed-up: against P = {base}; "
        f"each rank uses {threads} CPU thread{'s'[: threads != 1]}.\n"
        "comm share: part of the step spent waiting for communication and for other ranks. "
        "AllGather: of all K and V, by itself. GB/s: bytes a rank receives / its time.\n"
        "peak memory: live tensors of the rank that has most. max error: against a single device in plain torch; 0 is bit for bit."
    )


def _row(record: Record, base: Record) -> Row:
    ranks, seconds = record["case"]["ranks"], record["timing"]["median_s"]
    speedup = base["timing"]["median_s"] / seconds
    gather = record["comm"]["all_gather"] or {}
    return Row(
        ranks=ranks,
        milliseconds=seconds * 1e3,
        speedup=speedup,
        efficiency=speedup * base["case"]["ranks"] / ranks,
        tokens_per_s=record["work"]["tokens"] / seconds,
        share=record["comm"]["share"],
        gather_ms=gather.get("ms"),
        gb_per_s=gather.get("gb_per_s"),
        peak_bytes=record["memory"]["peak_bytes"],
        error=record["check"]["max_abs_error"],
        flags=flags(record),
    )


def _failed_cells(record: Record) -> tuple[str, ...]:
    return (str(record["case"]["ranks"]), *[DASH] * (len(COLUMNS) - 2), record["status"])


def flags(record: Record) -> tuple[str, ...]:
    """Why the timing of a record must be read with care."""
    transport = record["transport"]
    found = {
        "oversubscribed": transport["oversubscribed"],
        "shared GPU": transport["shared_gpu"],
        "skew-limited": record["timing"]["skew_limited"],
    }
    return tuple(name for name, holds in found.items() if holds)


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
