"""Test every call of mpi4py's communicators through the checked communicator.

Each call is known, and ranks whose calls differ get an error on all ranks.
"""

import inspect
from typing import Any

import numpy as np
import pytest
from kit.failing import as_two, assert_fails, failure_of
from kit.wrong_calls import (
    CALLS_THAT_DIFFER,
    MESSAGES_THAT_DIFFER,
    ON_PROCESSES,
    WRONG,
    sent,
)
from mpi4py import MPI
from test_kit_flows import offered

from sp_core.testing import spmd, tier
from sp_core.testing.checked import AGREED, LOCAL, CheckedComm
from sp_core.testing.messages import MESSAGES, PROBES
from sp_core.testing.signatures import COLLECTIVES
from sp_core.testing.unchecked import UNCHECKED

# these laws hold for threads and for MPI
pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("soon_stuck")]

TOPOLOGIES = ("Cartcomm", "Graphcomm", "Distgraphcomm")


def ways(name: str) -> set[str]:
    """Return the names of all categories of the checked communicator in which a call is."""
    stem = name.removesuffix("_init")
    found = {
        "collective": {stem, stem[1:].capitalize()} & COLLECTIVES.keys(),
        "agreed": name in AGREED,
        "message": name in MESSAGES | PROBES,
        "own": name in vars(CheckedComm)
        or any(name in vars(base) for base in CheckedComm.__mro__[1:-1]),
        "local": name.startswith(LOCAL),
        "unchecked": name in UNCHECKED,
    }
    return {way for way, so in found.items() if so}


OF_THE_CLASS = {
    "Create_errhandler",
    "Create_from_group",
    "Create_keyval",
    "Free_keyval",
    "Get_parent",
    "Join",
    "f2py",
    "fromhandle",
    "fromint",
}


@pytest.mark.parametrize("kind", ["Intracomm", *TOPOLOGIES])
def test_every_call_of_mpi4py_is_known(kind: str) -> None:
    names = {
        name for name in dir(getattr(MPI, kind)) if callable(getattr(getattr(MPI, kind), name))
    }
    treated = {name: ways(name) for name in names - OF_THE_CLASS if not name.startswith("_")}
    assert len(treated) > 150
    assert {name for name, found in treated.items() if not found} == set()
    assert {
        name
        for name, found in treated.items()
        if {"collective", "agreed", "message", "local"} >= found and len(found) > 1
    } == set()


@pytest.mark.parametrize("op", COLLECTIVES)
def test_the_parameters_of_a_collective_are_those_of_mpi4py(op: str) -> None:
    parameters = inspect.signature(getattr(MPI.Cartcomm, op)).parameters
    forms = {name: parameter.annotation for name, parameter in parameters.items() if name != "self"}
    assert list(COLLECTIVES[op]) == list(forms)
    for name, form in COLLECTIVES[op].items():
        assert (
            name not in ("buf", "sendbuf", "recvbuf")
            or f"BufSpec{form}" in forms[name].replace(" |", "").split()
        )
    assert {f"I{op.lower()}", f"{op}_init"} <= set(dir(MPI.Cartcomm))


def arguments(
    op: str, comm: Any, n: int = 2, dtype: str = "f8", root: int = 0, reduction: str = "SUM"
) -> dict[str, Any]:
    """Return valid arguments of a collective, which all ranks may pass."""
    blocks = 2 if op.startswith("Neighbor") else comm.size
    types = [{"f8": MPI.DOUBLE, "i8": MPI.INT64_T}[dtype]] * blocks
    made: dict[str, Any] = {}
    for name, form in COLLECTIVES[op].items():
        whole = np.zeros(n * blocks, dtype)
        buffer = {
            "": whole if (op, name) == ("Reduce_scatter", "sendbuf") else np.zeros(n, dtype),
            "B": whole,
            "V": [whole, [n] * blocks],
            "W": [whole, [n] * blocks, [8 * n * i for i in range(blocks)], types],
        }
        made[name] = {"root": root, "op": getattr(MPI, reduction), "recvcounts": [n] * blocks}.get(
            name, buffer[form]
        )
    return made


DIFFERENT: dict[str, tuple[set[str], dict[str, Any]]] = {
    "count": ({"buf", "sendbuf"}, {"n": 3}),
    "datatype": ({"buf", "sendbuf"}, {"dtype": "i8"}),
    "root": ({"root"}, {"root": 1}),
    "reduction": ({"op"}, {"reduction": "MAX"}),
    "operation": (set(), {}),
    "nothing": (set(), {}),
}
"""Changes of one rank's arguments, each valid by itself, and the parameters of which one is needed.

"operation" and "nothing" change the call.
"""


@pytest.mark.parametrize("difference", DIFFERENT)
def test_every_collective_in_which_a_rank_differs_is_reported_on_all(difference: str) -> None:
    needs, changes = DIFFERENT[difference]
    concerned = [op for op in offered() if not needs or needs & COLLECTIVES[op].keys()]
    for number, op in enumerate(concerned):
        forms = [op, f"I{op.lower()}", *([f"{op}_init"] if tier() == "mpi" else [])]
        form = forms[(number + len(difference)) % len(forms)]

        @spmd(2)
        def body(comm: Any, op: str = op, form: str = form) -> None:
            comm = comm.Create_cart([2], [True]) if op.startswith("Neighbor") else comm
            odd, other = comm.rank == 1, "Barrier" if op != "Barrier" else "Allreduce"
            if odd and difference == "operation":
                form, op = other, other
            if not (odd and difference == "nothing"):
                begun = getattr(comm, form)(**arguments(op, comm, **(changes if odd else {})))
                waits = begun is None or begun.Wait()
                assert waits

        text = failure_of(body)
        assert text.startswith("RankFailure[CollectiveMismatch]"), (form, text)


DIFFERENCES = CALLS_THAT_DIFFER | MESSAGES_THAT_DIFFER | (ON_PROCESSES if tier() == "mpi" else {})


@pytest.mark.parametrize("case", DIFFERENCES)
def test_calls_in_which_ranks_differ_are_reported_on_all(case: str) -> None:
    said, zero, one = DIFFERENCES[case]
    words = [said] if isinstance(said, str) else said
    assert_fails(as_two(zero, one), "CollectiveMismatch", *words)


def test_messages_that_have_arrived_are_not_told_where_calls_differ() -> None:
    test = as_two(lambda c: (c.Recv(sent(), 1), c.Barrier()), lambda c: c.Send(sent(), 0))
    assert "does not expect" not in assert_fails(test, "CollectiveMismatch")


@pytest.mark.parametrize("case", WRONG)
def test_a_rank_that_contradicts_itself_is_told_so_and_the_others_are_woken(case: str) -> None:
    said, wrong = WRONG[case]
    kinds = "ValueError|TypeError|KeyError|RootError|Exception"
    assert_fails(as_two(lambda c: c.Barrier(), wrong), kinds, said, "rank 0: stopped: PeerFailed")
