"""Append a Markdown file to the summary of a workflow's job: `python -m ci.summary REPORT.md`.

A summary that is too long would be dropped as a whole, so a long file is cut and says so.
"""

import os
import sys
from pathlib import Path

LIMIT = 1 << 20  # bytes of one step; GitHub says "supports content up to a size of 1024k"
CUT = "\n\nThe rest does not fit here: see the artifact.\n"


def shortened(text: str, limit: int) -> str:
    """Return a text, cut at the end of a line if it has more than `limit` bytes."""
    if len(text.encode()) <= limit:
        return text
    kept = text.encode()[: limit - len(CUT)].decode(errors="ignore")
    return kept.rpartition("\n")[0] + CUT


def main(path: str) -> int:
    """Append a file to the summary of the job. Return the exit code."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        print(f"summary: {error}", file=sys.stderr)
        return 1
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a") as file:
            file.write(shortened(text, LIMIT))
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
