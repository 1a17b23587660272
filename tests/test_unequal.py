"""Sequences of unequal length, computed as a plan says.

In the caller's order, each as it would be alone.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from hypothesis import strategies as st
from llama_cases import Case

import sp_core as sp
from sp_core.llama import prefill_unequal
from sp_core.scheduling import Plan, Work, balanced
from sp_core.testing import given, spmd


def texts_of(case: Case, lengths: list[int]) -> list[list[int]]:
    line: list[int] = case.tokens(sum(lengths)).tolist()
    return [line[sum(lengths[:n]) : sum(lengths[: n + 1])] for n in range(len(lengths))]


class Slow:
    """A counter that answers late, before or after the number is drawn."""

    def __init__(self, counter: Any, seconds: float, *, before: bool) -> None:
        self._counter, self._seconds, self._before = counter, seconds, before

    def take(self) -> int:
        time.sleep(self._seconds * self._before)
        number: int = self._counter.take()
        time.sleep(self._seconds * (not self._before))
        return number

    def free(self) -> None:
        self._counter.free()


@given(
    max_ranks=4,
    max_examples=10,
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    late=st.lists(st.sampled_from([0.0, 1e-3, 2e-2]), min_size=4, max_size=4),
    before=st.booleans(),
    tensor=st.booleans(),
    pass_tokens=st.sampled_from([1, 8]),
)
def test_ranks_that_are_late_change_no_result(
    comm: Any, lengths: list[int], late: list[float], before: bool, tensor: bool, pass_tokens: int
) -> None:
    """Late to the plan, to the counter, or with what they took.

    The others compute what they leave.
    """
    tp = 2 if tensor and comm.size % 2 == 0 else 1
    case, waiting = Case((4, 2), layers=1), tuple(range(len(lengths)))
    texts = texts_of(case, lengths)
    with sp.Mesh(comm, ring=comm.size // tp, tp=tp) as mesh:
        model, ring = case.model(mesh), mesh["ring"]
        others = ((),) * (ring.size - 1)
        wanted = prefill_unequal(model, texts, Plan(tuple(lengths), (), (waiting, *others)))
        counter = ring.counter
        vars(ring)["counter"] = lambda: Slow(counter(), late[comm.rank], before=before)
        for _ in range(2):
            time.sleep(late[-1 - comm.rank])
            plan = Plan(tuple(lengths), (), ((), *others), waiting)
            torch.testing.assert_close(
                prefill_unequal(model, texts, plan, pass_tokens=pass_tokens), wanted
            )


@spmd(2, 4)
def test_one_rank_takes_everything_where_the_others_come_too_late(comm: Any) -> None:
    case, lengths = Case((4, 2), layers=1), [2, 1, 3, 1, 2]
    texts, nobody = texts_of(case, lengths), ((),) * comm.size
    with sp.Mesh(comm, ring=comm.size) as mesh:
        model, counter = case.model(mesh), mesh["ring"].counter
        wanted = prefill_unequal(model, texts, balanced(lengths, comm.size, Work(1, 1)))
        vars(mesh["ring"])["counter"] = lambda: Slow(counter(), 0.2 * (comm.rank > 0), before=True)
        plan = Plan(tuple(lengths), (), nobody, tuple(range(len(lengths))))
        torch.testing.assert_close(prefill_unequal(model, texts, plan, pass_tokens=1), wanted)


@spmd(1, 2, 4)
def test_a_counter_gives_each_number_to_one_rank(comm: Any) -> None:
    with sp.Mesh(comm, ring=comm.size) as mesh:
        for _ in range(2):
            counter = mesh["ring"].counter()
            mine = []
            while (number := counter.take()) < 50:
                mine.append(number)
            counter.free()
            found = sorted(number for numbers in comm.allgather(mine) for number in numbers)
            assert found == list(range(50))
