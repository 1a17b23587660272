"""Test the errors of ranks whose calls differ or fail, word by word."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, repeat
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kit.meshed import meshed

import sp_core as sp
from sp_core import agreement, progress
from sp_core.agreement import agree, agreeing_in_turn
from sp_core.errors import AGREED
from sp_core.integrations.sequences import digest
from sp_core.testing import run_threads, spmd

DISAGREE = "the ranks disagree about what to do; nothing was sent. Make these calls equal:"
LETTERS = "".join(map(chr, range(0x100, 0x100 + 900)))


def refused(comm: Any, call: str, error: Exception | None = None) -> Exception:
    """Return the error that `agree` raises, after checks that hold for every such error."""
    with pytest.raises(agreement.ERRORS) as caught:
        agree(comm, call, 0, error)
    assert caught.value.__cause__ is error
    assert bool(vars(caught.value)[AGREED]) == (comm.rank > 0)
    return caught.value


CALLS: list[tuple[list[Any], type[Exception], str]] = [
    (
        ["f(1)", "f(2)", "f(1)"],
        sp.CollectiveMismatch,
        f"{DISAGREE}\n  rank 0, 2: f(1)\n  rank 1: f(2)",
    ),
    (["f", sp.ShapeError("a"), ValueError("b")], sp.ShapeError, "rank 1: a\nrank 2: b"),
    ([TypeError("a"), "g", TypeError("a")], TypeError, "rank 0: a"),
    (["f", "f", ZeroDivisionError("a")], sp.RankError, "rank 2: ZeroDivisionError: a"),
    *((["f", "f", kind("a")], kind, "rank 2: a") for kind in agreement.ERRORS),
    (["f", "f", ValueError("caf\udce9")], ValueError, "rank 2: caf\udce9"),
    (["f", "f", ValueError(LETTERS)], ValueError, f"rank 2: {LETTERS}"),
    (
        ["f", "f", ValueError(LETTERS * 2)],
        ValueError,
        f"rank 2: {LETTERS[:80]} ... {LETTERS[-40:]} ...",
    ),
]


@pytest.mark.parametrize(("calls", "kind", "text"), CALLS)
@spmd(3)
def test_three_ranks_are_told(
    comm: Any, calls: list[Any], kind: type[Exception], text: str
) -> None:
    mine = calls[comm.rank]
    error = refused(comm, *(("", mine) if isinstance(mine, Exception) else (mine,)))
    assert (type(error), str(error)) == (kind, text)


def shown(call: str, start: int = 80) -> str:
    """Return a long call as errors show it: its beginning, and what follows from `start` on."""
    return f"{call[:80]} ... {call[start : start + 180]} ..."


MANY = ["a" * 299] * 4 + ["b" * 300] * 3 + ["c" * 500, "d" * 500, "e" * 500]
MANY += ["a" * 299] * 5 + ["b" * 300] * 6
MANY_SHOWN = [
    f"0, 1, 2, 3, 10, 11, 12, 13, 14: {'a' * 299}",
    f"4, 5, 6, 15, 16, 17, 18, 19 ...: {shown('b' * 300)}",
    *(f"{rank}: {shown(MANY[rank])}" for rank in (7, 8, 9)),
]
WHOLE = LETTERS + "." * 100
LONG: dict[str, tuple[list[str], list[str]]] = {
    **{
        f"a difference at {place} is shown from {start} on": (
            [WHOLE, other := LETTERS[:place] + "." * (1000 - place)],
            [f"0: {shown(WHOLE, start)}", f"1: {shown(other, start)}"],
        )
        for place, start in ((119, 80), (121, 81), (600, 560))
    },
    "calls differ late, but from a third one early": (
        three := ["a" * 590 + "x" * 10, "a" * 590 + "y" * 10, "a" * 100 + "z" * 500],
        [f"{rank}: {shown(call)}" for rank, call in enumerate(three)],
    ),
    # two lines of 889 and 890 letters, two beginnings of ten letters, and a line feed
    "1800 characters are shown": (
        two := ["a" * 889, "b" * 890],
        [f"{rank}: {call}" for rank, call in enumerate(two)],
    ),
    "1801 characters are cut": (
        two := ["a" * 889, "b" * 891],
        [f"{rank}: {shown(call)}" for rank, call in enumerate(two)],
    ),
    "only the last of a million letters differs": (
        million := ["a" * 10**6, "a" * (10**6 - 1) + "b"],
        [f"{rank}: {shown(call, 10**6 - 41)}" for rank, call in enumerate(million)],
    ),
    "lists of ranks up to 30 letters, calls up to 299": (MANY, MANY_SHOWN),
    "five calls, and the number of others": ([*MANY, "f"], MANY_SHOWN),
}
"""By description: the calls of all ranks, and the lines of the error, each from "rank" on."""


@pytest.mark.parametrize("name", LONG)
def test_long_texts_are_cut(name: str) -> None:
    calls, lines = LONG[name]
    more = ["  and 1 more"] * (len({*calls}) > len(lines))
    text = "\n".join([DISAGREE, *(f"  rank {line}" for line in lines), *more])
    assert {*run_threads(len(calls), lambda comm: str(refused(comm, calls[comm.rank])))} == {text}


LEFT = "rank {} has left because of an error; read the error that it printed. Nothing was sent."
LEAVING: list[tuple[list[tuple[str, str]], str]] = [
    (
        [("call", "x" * 40), ("call", "y" * 39), ("free", "")],
        "some ranks leave and others do not; nothing was sent. Make these calls equal:\n"
        f"  rank 0: {'x' * 40}...\n  rank 1: {'y' * 39}\n  rank 2: free() of mesh['a']",
    ),
    (
        # rank 0 frees one communicator, the others the whole mesh
        [("free", ""), ("end", ""), ("end", "")],
        "some ranks leave and others do not; nothing was sent. Make these calls equal:\n"
        "  rank 0: free() of mesh['a']\n"
        "  rank 1: free() of mesh['a'] with its mesh\n  rank 2: free() of mesh['a'] with its mesh",
    ),
    (
        [("call", "same"), ("leave", "same"), ("leave", "z" + "é" * 20)],
        f"{LEFT.format(1)}\n  rank 0: same\n  rank 1: same\n  rank 2: z{'é' * 19}...",
    ),
    (
        [("call", "f"), ("call", "f"), ("leave", "f")],
        f"{LEFT.format(2)}\n  rank 0: f\n  rank 1: f\n  rank 2: f",
    ),
    (
        [("refuse", "bad"), ("call", "f"), ("leave", "why")],
        f"{LEFT.format(2)}\n  rank 0: bad\n  rank 1: f\n  rank 2: why",
    ),
]


@pytest.mark.mpi_skip
@pytest.mark.parametrize(("acts", "text"), LEAVING)
@spmd(3)
def test_ranks_are_told_who_leaves(comm: Any, acts: list[tuple[str, str]], text: str) -> None:
    act, words = acts[comm.rank]
    mesh = sp.Mesh(comm, a=3)
    group = mesh["a"]
    if act == "leave":
        group.decline(words)
        return

    def call() -> Any:
        if act == "refuse":
            raise sp.ShapeError(words)
        return words

    with pytest.raises(sp.RankError) as caught:
        {"free": group.free, "end": mesh.free}.get(act, partial(group.agree_on, call))()
    assert str(caught.value) == text
    has_left = isinstance(caught.value, sp.PeerFailed)
    assert has_left == text.startswith("rank")
    assert bool(vars(caught.value)[AGREED]) == (has_left or comm.rank > 0)


@pytest.mark.parametrize("axes", [{"a": 3}, {"b": 1, "a": 3}])
@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize(("other", "leaves"), [("f", False), ("f", True), ("h", False)])
def test_an_agreement_that_an_error_interrupts_goes_on(
    other: str, differ: bool, leaves: bool, axes: dict[str, int]
) -> None:
    """The other ranks get the values of all, and then learn that rank 0 leaves, or its next call.

    If they had made another call, rank 0 learns that in its next call, and only there.

    An operation that is under way lets rank 0 wait by polling, where a signal may raise an error.
    A communicator in another order of axes does not overtake this agreement.
    """
    under_way = Mock(**{"advance.side_effect": chain([TimeoutError], repeat(False))})
    others_may_call = Event()

    def body(comm: Any) -> None:
        mesh = sp.Mesh(comm, **axes)  # type: ignore[arg-type]
        group, mine = mesh[tuple(axes)], progress.of_this_rank()
        sp.fence(comm=mesh[tuple(axes)[::-1]])
        if comm.rank == 0:
            mine.add(under_way)
            with pytest.raises(TimeoutError):
                group.agree_on(lambda: "f")
            if leaves:
                mesh.__exit__(TimeoutError, TimeoutError(), None)
            others_may_call.set()
        others_may_call.wait(5)
        if comm.rank and other == "f":
            assert group.agree_on(lambda: "f", lambda: 7 * differ) == (0, 7 * differ, 7 * differ)
        elif other == "h":
            with pytest.raises(sp.CollectiveMismatch):
                group.agree_on(lambda: other, lambda: 7 * differ)
        if leaves and comm.rank:
            with pytest.raises(sp.PeerFailed):
                group.agree_on(lambda: "g")
            mesh._abandon(TimeoutError())
        elif not leaves:
            assert group.agree_on(lambda: "g", lambda: comm.rank) == (0, 1, 2)
            mesh.free()
        with sp.Mesh(comm, **axes):  # type: ignore[arg-type]
            pass
        mine.settle(5)
        assert mine.kept == []

    run_threads(3, body, timeout=10)


def test_an_interrupted_agreement_of_a_mesh_outlives_the_call() -> None:
    """MPI writes to its memory when the other ranks make the mesh."""
    others_may_call = Event()

    def body(comm: Any) -> None:
        mine = progress.of_this_rank()
        if comm.rank == 0:
            mine.add(Mock(**{"advance.side_effect": chain([TimeoutError], repeat(False))}))
            with pytest.raises(TimeoutError):
                agree(comm, "f")
            assert len(mine.kept) == 1
            others_may_call.set()
        else:
            others_may_call.wait(5)
            agree(comm, "f")
        mine.settle(5)
        assert mine.kept == []

    run_threads(2, body)


def test_an_agreement_that_is_kept_while_another_thread_polls_is_tested_later() -> None:
    found, question = progress.Progress(), Mock(**{"test.return_value": True})
    with ThreadPoolExecutor(1) as thread:
        thread.submit(found.lock.acquire).result()
        found.keep([question])
        assert (found.kept, found.idle, question.test.called) == ([question], False, False)
        thread.submit(found.lock.release).result()
    found.poll()
    assert (found.kept, found.idle) == ([], True)


def test_no_agreement_is_tested_once_the_program_has_finalized_mpi(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MPI would end the process with an error."""
    found, question = progress.Progress(), Mock(**{"test.return_value": False})
    found.keep([question])
    question.test.reset_mock()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", Mock(**{"Is_finalized.return_value": True}))
    found.settle(5)
    assert (found.kept, question.test.called) == ([], False)


@pytest.mark.mpi_skip
@spmd(1)
def test_last_agreements_begin_in_the_order_in_which_they_were_made(comm: Any) -> None:
    """Each rank tests them at its own times. MPI matches them in the order in which they begin."""
    one, interrupted = agreement.Control(comm), Mock(**{"test.return_value": False})
    one.open.append(interrupted)
    controls = one, agreement.Control(comm, one)
    first, second = (x for control in controls for x in control.leave("", agreement.State.FREES))
    interrupted.test.return_value = True
    assert not first.requests
    assert second.test() == bool(first.requests) == first.test()


@spmd(1, 2, 3)
def test_control_bytes_are_counted(comm: Any) -> None:
    """An agreement sends a digest of 32 bytes, and 64 bytes to each other rank if values differ."""
    others = comm.size - 1
    with sp.Mesh(comm, a=comm.size) as mesh:
        group = mesh["a"]
        control = group.counters["control"]
        for check, sent in ((None, 0), (lambda: comm.rank, 64 * others)):
            before = control.bytes_sent
            group.agree_on(lambda: "f()", check)
            assert control.bytes_sent - before == 32 * (others > 0) + sent
        before = control.bytes_sent
    assert control.bytes_sent - before == 32 * (others > 0) + 64 * others


@spmd(1, 2)
@meshed()
def test_agreements_after_an_error_return_no_numbers(mesh: sp.Mesh) -> None:
    check, found = Mock(side_effect=[sp.ShapeError("wrong"), 3]), list[tuple[int, ...]]()
    with pytest.raises(sp.ShapeError, match="wrong"), agreeing_in_turn() as agree_on:
        found.extend(agree_on(mesh["sp"], lambda: "a call", check) for _ in range(2))
    assert found == [(), ()]


def test_the_digest_of_a_batch_is_of_all_its_tokens() -> None:
    tokens = torch.zeros(2, 100_000, dtype=torch.int64)
    told = {digest(tokens, None), digest(None, tokens), digest(tokens.view(4, -1), None)}
    for place in ((0, 0), (0, 8192), (1, 99_999)):
        tokens[place] = 1
        told.add(digest(tokens, None))
    assert len(told) == 6
