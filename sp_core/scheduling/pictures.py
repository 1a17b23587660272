"""Draw a pipeline as text: one line for each stage, time from left to right, the micro-batch of each slot."""

from __future__ import annotations

from sp_core.scheduling.pipeline import Timeline


def picture(shown: Timeline, unit: float = 1.0) -> str:
    """Draw a time line.

    Args:
        shown: what to draw.
        unit: time of one column; a forward shows its number, a backward the number and a prime,
            waiting shows dots.

    Returns:
        Lines of text, the last of which tells the bubble.
    """
    cell = (
        max(
            (
                len(_name(slot.direction, slot.batch))
                for slots in shown.stages
                for slot, _, _ in slots
            ),
            default=1,
        )
        + 1
    )
    lines = []
    for stage, slots in enumerate(shown.stages):
        columns = ["." * (cell - 1)] * round(shown.end / unit)
        for slot, start, stop in slots:
            first = round(start / unit)
            columns[first : round(stop / unit)] = [_name(slot.direction, slot.batch)] * (
                round(stop / unit) - first
            )
        lines.append(f"stage {stage} |" + "".join(column.rjust(cell) for column in columns))
    return "\n".join([*lines, f"bubble: {shown.bubble:.1%} of the stages' time"])


def _name(direction: str, batch: int) -> str:
    return f"{batch}'" if direction == "B" else str(batch)
