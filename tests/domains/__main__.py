"""Draw every pair of parts (`nox -s explore`): `python -m domains --seed 7`.

A pair that the library refuses in the base row is impossible; the report lists it with the
library's words. Exits with 1 where a result is wrong, a rank hangs, or ranks are told different
things.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from studies.records import write

from domains.report import Record, explored, markdown
from domains.subjects import BY_NAME


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m domains", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(2**31), help="of the rows"
    )
    parser.add_argument(
        "--only", nargs="+", default=list(BY_NAME), metavar="CALL", help="names of public calls"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="how many at a time (default: one per core)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("reports"), help="folder of the report (default: reports)"
    )
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    records: list[Record] = []
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for record in pool.map(partial(explored, seed=options.seed), options.only):
            records.append(record)
            shown = (
                f"{record['drawn']} of {record['possible']} possible pairs, {record['calls']} calls"
            )
            print(f"{record['subject']}: {shown} {record['fault']}", flush=True)
    write(options.out, "domains", markdown(records, options.seed), records)
    return int(any(r["fault"] or r["drawn"] < r["possible"] for r in records))


if __name__ == "__main__":
    sys.exit(main())
