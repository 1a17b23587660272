"""Choose an algorithm for "auto". Every rank decides alone, from the same numbers."""

from __future__ import annotations

import math
from functools import lru_cache

from sp_core.tuning.constants import Tuning
from sp_core.tuning.model import Nodes, predict

STEPS_PER_OCTAVE = 4
"""Decisions are made for so many sizes between n and 2n. Sizes in between use the nearest one."""


def decide(
    tuning: Tuning, op: str, nodes: Nodes, nbytes: int, *, among: tuple[str, ...], planned: bool
) -> str:
    """Return the quickest algorithm for a collective.

    Args:
        tuning: constants, the same on every rank.
        op: collective.
        nodes: the node of each rank.
        nbytes: of the whole vector, the same on every rank.
        among: names to choose from, "mpi" among them, which is taken where nothing is quicker.
        planned: for a plan, which prepares its steps once; else for one call.

    Returns:
        A name; "mpi" where there is nothing to choose, or where a link was never measured.
    """
    if nbytes == 0 or len(nodes) == 1 or op not in tuning.times:
        return "mpi"
    return _decided(tuning, op, nodes, round(math.log2(nbytes) * STEPS_PER_OCTAVE), among, planned)


@lru_cache(maxsize=4096)
def _decided(
    tuning: Tuning, op: str, nodes: Nodes, place: int, among: tuple[str, ...], planned: bool
) -> str:
    if len(set(nodes)) > 1 and "network" not in tuning.links:
        return "mpi"
    nbytes = round(2 ** (place / STEPS_PER_OCTAVE))
    timed = [
        name for name in among if name in tuning.times[op]
    ]  # the model alone is not good enough to prefer a stranger
    seconds = {
        name: predict(tuning, op, name, nodes, nbytes, planned=planned).seconds for name in timed
    }
    return min(seconds, key=lambda name: (seconds[name], name != "mpi"), default="mpi")
