"""Run a program of the benchmarks: `python -m benchmarks NAME ARGUMENTS...`, as `nox -s NAME` does.

`python -m benchmarks NAME --help` lists the arguments.
"""

import argparse
import pkgutil
import sys

from benchmarks import launching

PROGRAMS = {
    "scaling": "benchmarks.scaling:main",
    "bench": "benchmarks.record:main",
    "counters": "benchmarks.counters:main",
    "compare": "benchmarks.compare.command:main",
    "bench_selftest": "benchmarks.compare.selftest:main",
    "report": "benchmarks.reporting.report:main",
    "trace": "benchmarks.reporting.trace:main",
    "balance": "benchmarks.contests.balance:balance",
    "documents": "benchmarks.contests.documents:contest",
    "growth": "benchmarks.contests.growth:growth",
    "collectives": "benchmarks.contests.collectives.table:collectives",
    "netlab": "benchmarks.contests.netlab.table:netlab",
    "peers": "benchmarks.contests.peers.table:peers",
    "peers_model": "benchmarks.contests.peers.models:models",
    "peers_decoding": "benchmarks.contests.peers.models:decoding",
    "gpu": "benchmarks.contests.gpu:gpu",
    "train": "benchmarks.training.contest:train",
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    name = parser.parse_args(sys.argv[1:2]).program
    del sys.argv[1]
    launching.main(pkgutil.resolve_name(PROGRAMS[name]))
