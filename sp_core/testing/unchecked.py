"""Name the calls of mpi4py that the ranks do not check, and print such a call once."""

import sys

from sp_core.launch.watch import here
from sp_core.testing import session

UNCHECKED = {
    "Create_group": "only members of the group call it; the new communicator is checked",
    **dict.fromkeys(
        ("Create_intercomm", "Accept", "Connect", "Spawn", "Spawn_multiple"),
        "it returns an intercommunicator, whose calls go to mpi4py unchecked",
    ),
    **dict.fromkeys(
        (
            "Revoke",
            "Agree",
            "Iagree",
            "Shrink",
            "Ishrink",
            "Get_failed",
            "Ack_failed",
            "Is_revoked",
        ),
        "it serves programs whose ranks may die, and the check needs all ranks",
    ),
    **dict.fromkeys(
        ("Psend_init", "Precv_init"),
        "its partitions are marked ready by calls of the request, not of a communicator",
    ),
    **dict.fromkeys(
        ("Win.Create", "Win.Allocate", "Win.Allocate_shared", "Win.Create_dynamic"),
        "in one-sided communication the target rank makes no call that could be compared",
    ),
    **dict.fromkeys(
        ("Isendrecv", "Isendrecv_replace"),
        "MPICH does not report their received messages, so later messages are unchecked too",
    ),
    "a message in memory of a kind that only mpi4py knows": "its length is not known, so "
    "messages after it are unchecked too",
    "File.Open": "calls on a file do not go through its communicator",
}
"""Calls on or with a communicator that the ranks do not check: by name, the reason."""


def say(name: str) -> None:
    """Print once that the ranks do not check a call; the session's report repeats this."""
    text = (
        f"not checked between ranks: {name}, because "
        f"{UNCHECKED.get(name, 'this version of the kit does not know it')}"
    )
    if text not in session.current.notes:
        session.current.notes[text] = None
        print(f"sp_core.testing: {text} (first at {here()})", file=sys.stderr)  # noqa: T201  # once
