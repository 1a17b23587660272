"""Draw every pair of parts of each domain (`nox -s explore`): `python -m domains --seed 7`.

A pair is impossible if the library refuses it in the base row, the row of all first parts. The
report lists such pairs with the library's error. The exit code is 1 if a result is wrong, a rank
hangs, ranks get different errors, or a possible pair was not drawn.
"""

import argparse
import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from studies.records import write

from benchmarks import launching
from benchmarks.launching import Options, about
from domains.report import Record, explored, markdown
from domains.subjects import BY_NAME

OPTIONS: Options = {
    "--seed": about(type=int, help="of the rows (default: any)"),
    "--only": about(
        nargs="+", default=[*BY_NAME], choices=[*BY_NAME], metavar="CALL", help="public calls"
    ),
    "--jobs": about(type=int, default=os.cpu_count() or 1, help="how many (default: one a core)"),
    "--out": about(type=Path, default=Path("reports"), help="folder of the report"),
}


@launching.program(
    "python -m domains", __doc__, OPTIONS, seed=random.SystemRandom().randrange(2**31)
)
def main(options: argparse.Namespace) -> int:
    """Run the command line; return the exit code."""
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
    launching.main(main)
