"""Test that on every rank the next piece travels while the present one is computed."""

import functools
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.meshed import meshed
from oracle.attention_check import Shards
from oracle.strategies import AttentionProblem

import sp_core as sp
from sp_core.attention import tiles
from sp_core.schemes import SCHEMES, problem, tp_sp
from sp_core.schemes.heads import GROUPS
from sp_core.testing import run_threads, spmd

SIZE = 3
PLAIN = AttentionProblem(
    *(
        1,
        12,
        12,
        4,
        1,
        4,
        "float64",
        "contiguous",
        "contiguous",
        sp.Mask(),
        None,
        1.0,
        "normal",
        "normal",
        (True, True, True),
        "plain",
        7,
    )
)


class Log:
    """Record each rank's events: ("start", n) and ("wait", n) of transfer n, and ("compute", 0)."""

    def __init__(self) -> None:
        self._by_thread: dict[int, list[tuple[str, int]]] = defaultdict(list)

    @property
    def mine(self) -> list[tuple[str, int]]:
        return self._by_thread[threading.get_ident()]

    def computing(self, function: Any) -> Any:
        @functools.wraps(function)
        def logged(*args: Any, **kwargs: Any) -> Any:
            self.mine.append(("compute", 0))
            return function(*args, **kwargs)

        return logged

    def listen(self, comm: sp.Communicator) -> None:
        """Record the transfers that `comm` starts and waits for. Calls of `prepare` fail."""
        transport, log, wait = vars(comm.transport), self.mine, comm.wait
        handles: list[Any] = []

        def started(begin: Callable[..., Any], *given: Any, **named: Any) -> Any:
            handles.append(begin(*given, **named))
            log.append(("start", len(handles) - 1))
            return handles[-1]

        def waited(handle: Any, name: str = "") -> None:
            log.extend(("wait", n) for n, other in enumerate(handles) if other is handle)
            wait(handle, name)

        for name in ("start", "exchange"):
            vars(comm)[name] = functools.partial(started, getattr(comm, name))
        transport["prepare"] = None
        comm.wait = waited  # type: ignore[method-assign]


def check_order(log: list[tuple[str, int]], pieces: int, per_piece: int, first: int) -> None:
    """Check that the transfer of piece i + 1 starts before the computation of piece i.

    The wait for that transfer comes after the computation. The transfer of piece i + 2 does not
    start before it. Transfer `first` carries piece 1; a piece takes `per_piece` computations.
    """
    computed = [place for place, (event, _) in enumerate(log) if event == "compute"]
    assert len(computed) == pieces * per_piece
    for piece in range(pieces - 1):
        begin, end = computed[piece * per_piece], computed[(piece + 1) * per_piece - 1]
        assert log.index(("start", first + piece)) < begin
        assert log.index(("wait", first + piece)) > end
        assert ("start", first + piece + 1) not in log[:begin]


def attend(name: str, mask: sp.Mask, mesh: sp.Mesh) -> Callable[[], object]:
    """Prepare attention by a scheme."""
    shards = Shards(replace(PLAIN, mask=mask), mesh.rank, mesh.size, mesh.device)
    return functools.partial(shards.run, functools.partial(SCHEMES[name], comm=mesh["sp"]))


def multiply(mesh: sp.Mesh) -> Callable[[], object]:
    """Prepare a column-parallel layer."""
    sharding = sp.Sharding.contiguous(12 * mesh.size, mesh.size)
    linear = torch.nn.Linear(4, 6)
    layer = sp.ColumnParallelLinear.from_linear(linear, comm=mesh["sp"], sharding=sharding)
    return functools.partial(layer, torch.ones(1, 12, 4))


NOTHING_SEEN = sp.Mask(documents=(0, 0, 12), kv_documents=(0, 12, 12))
CASES: dict[
    str, tuple[Any, str, Callable[[sp.Mesh], Callable[[], object]], tuple[int, int, int]]
] = {
    **{
        f"{name} {what} {mask}": (problem, what, functools.partial(attend, name, mask), pieces)
        for name, what, mask, pieces in (
            ("ring", "attend", sp.Mask(), (SIZE, GROUPS, 0)),
            ("ring", "attend", sp.Mask(window=12), (SIZE, 1, 0)),
            ("ring", "attend", sp.Mask(documents=(0, 12)), (SIZE, 1, 0)),
            ("ring", "merge_into", sp.Mask(), (SIZE - 1, GROUPS, 1)),
            ("allgather_kv", "attend", sp.Mask(), (GROUPS, 1, 1)),
            ("allgather_kv", "attend", NOTHING_SEEN, (GROUPS, 1, 1)),
            ("allgather_kv", "merge_into", sp.Mask(), (0, 0, 1)),
        )
    },
    "column parallel": (torch.nn.functional, "linear", multiply, (tp_sp.CHUNKS, 1, 1)),
}
"""By name: the module and the function that compute, what prepares the call, and the arguments
`pieces`, `per_piece` and `first` of `check_order`."""


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_next_piece_travels_while_this_one_is_computed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, (module, function, prepared, order) = Log(), CASES[name]
    monkeypatch.setattr(module, function, log.computing(vars(module)[function]))

    @meshed()
    def body(mesh: sp.Mesh) -> None:
        call = prepared(mesh)
        log.listen(mesh["sp"])
        call()
        check_order(log.mine, *order)

    run_threads(SIZE, body)


@pytest.mark.parametrize(
    ("name", "under_way"),
    [("allgather_kv", [1, 2, 2, 1]), ("ring", [n for n in (1, 2, 1) for _ in range(GROUPS)])],
)
def test_gradients_travel_while_the_next_ones_are_computed(
    name: str, under_way: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next keys travel until the last computation, gradients from the second one on."""
    log = Log()
    monkeypatch.setattr(problem, "attend_backward", log.computing(vars(problem)["attend_backward"]))

    @meshed()
    def body(mesh: sp.Mesh) -> None:
        shards = Shards(PLAIN, mesh.rank, mesh.size, mesh.device)
        results = shards.run(functools.partial(SCHEMES[name], comm=mesh["sp"]))
        log.listen(mesh["sp"])
        shards.gradients(*results)
        events = [event for event, _ in log.mine]
        before = [events[:place] for place, event in enumerate(events) if event == "compute"]
        assert [some.count("start") - some.count("wait") for some in before] == under_way

    run_threads(SIZE, body)


@spmd(SIZE)
@meshed()
def test_what_is_under_way_is_asked_after_between_pieces_of_the_computation(
    mesh: sp.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each step of the ring a rank polls at least three times per group of heads."""
    monkeypatch.setattr(tiles, "POLLED_ROWS", 2)  # a rank has 4 queries
    log, asked, poll = Log(), list[int](), mesh["sp"].poll
    log.listen(mesh["sp"])

    def counted() -> None:
        asked.append(sum(event == "start" for event, _ in log.mine))
        poll()

    mesh["sp"].poll = counted  # type: ignore[method-assign]
    attend("ring", sp.Mask(), mesh)()
    assert min(asked.count(1), asked.count(2)) >= 3 * GROUPS
