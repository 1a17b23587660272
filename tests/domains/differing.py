"""Ranks that say different things: one rank's argument is changed to another valid value, or to one that is never valid."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sp_core as sp
from domains.declared import Subject, Values
from domains.trial import REFUSALS, finished
from sp_core.agreement import _gather_texts
from sp_core.testing import run_threads
from sp_core.testing.outcome import RankFailure
from sp_core.testing.run import ThreadsHung

Change = Callable[[Any], Any]

NEVER: dict[type, dict[str, Change]] = {
    Tensor: {
        "None": lambda x: None,
        "a number": lambda x: 3.0,
        "a list": lambda x: x.tolist(),
        "sparse": lambda x: x.detach().to_sparse(),
        "on another device": lambda x: x.detach().to("meta"),
        "complex": lambda x: x.detach().to(torch.complex64),
    },
    bool: {"text": lambda x: "no", "None": lambda x: None, "2": lambda x: 2, "a tensor": lambda x: torch.ones(2)},
    int: {
        "a fraction": lambda x: x + 0.5,
        "a float": float,
        "text": str,
        "None": lambda x: None,
        "far out": lambda x: 10**12,
        "a tensor": lambda x: torch.ones(2),
    },
    float: {"nan": lambda x: math.nan, "infinity": lambda x: math.inf, "text": str, "a list": lambda x: [x]},
    str: {"unknown": lambda x: "magic", "None": lambda x: None, "a number": lambda x: 3},
    tuple: {
        "a number": lambda x: 3,
        "text": lambda x: "abc",
        "too many": lambda x: (*x, *x),
        "fractions": lambda x: tuple(0.5 for _ in x),
    },
    list: {"a number": lambda x: 3, "None among them": lambda x: [*x, None], "None": lambda x: None, "a tensor": lambda x: x[0]},
    sp.Mask: {"True": lambda x: True, "a tensor": lambda x: torch.ones(2, 2), "text": lambda x: "causal"},
    sp.Sharding: {
        "None": lambda x: None,
        "a number": lambda x: 3,
        "for more ranks": lambda x: sp.Sharding.contiguous(x.seq_len, x.size + 1),
        "for more tokens": lambda x: sp.Sharding.contiguous(x.seq_len + x.size, x.size),
    },
}
"""Values that are never valid, by the type of the valid one."""

SOMETIMES: dict[type, dict[str, Change]] = {
    Tensor: {
        "another dtype": lambda x: x.detach().to(torch.float32 if x.dtype != torch.float32 else torch.float64),
        "longer at the end": lambda x: torch.cat([x.detach()] * 2, -1),
        "one dim more": lambda x: x.detach()[None],
        "another gradient": lambda x: x.detach().requires_grad_(x.is_floating_point() and not x.requires_grad),
    },
    bool: {"the other": lambda x: not x},
    int: {"one more": lambda x: x + 1, "one less": lambda x: x - 1},
    float: {"twice": lambda x: 2 * x, "None": lambda x: None},
    str: {"auto": lambda x: "auto", "ring": lambda x: "ring", "max": lambda x: "max"},
    tuple: {"None": lambda x: None, "in another order": lambda x: x[::-1]},
    list: {"one less": lambda x: x[:-1], "in another order": lambda x: x[::-1]},
    sp.Mask: {"None": lambda x: None, "causal": lambda x: sp.Mask(causal=not x.causal), "a window": lambda x: sp.Mask(window=3)},
    sp.Sharding: {
        "another layout": lambda x: sp.Sharding.striped(x.seq_len, x.size),
        "another start": lambda x: sp.Sharding.contiguous(x.seq_len, x.size, start=5),
    },
}
"""Values that are valid for some calls, by the type of the one that is valid for all ranks."""

GIVEN_INSTEAD_OF_NONE = {
    "mask": sp.Mask(),
    "softmax_scale": 0.5,
    "sizes": (2, 2),
    "split_sizes": (2, 2),
    "concat_sizes": (2, 2),
    "kv_sharding": sp.Sharding.contiguous(8, 2),
    "documents": (0, 4),
}
"""What a parameter that is None by default would be, to know its type."""

UNCLEAR = re.compile(
    r"has no attribute|object is not|not subscriptable|unsupported operand|not supported between|'NoneType' object"
)
"""Words of Python that speak of the code and not of what the caller has to do."""


@dataclass(frozen=True)
class Difference:
    """One changed argument.

    Attributes:
        parameter: whose value is changed.
        name: of the change.
        change: makes the new value from the valid one.
        is_valid: whether the value may be valid, so that the call may succeed on all ranks.
        everywhere: whether every rank has it, or the last one only.
    """

    parameter: str
    name: str
    change: Change
    is_valid: bool
    everywhere: bool

    def __str__(self) -> str:
        return f"{self.parameter}={self.name} on {'every rank' if self.everywhere else 'one rank'}"


def differences(subject: Subject, arguments: Values) -> Iterator[Difference]:
    """Return every change of every argument of a call, on one rank and on all."""
    for parameter, value in arguments.items():
        sample = GIVEN_INSTEAD_OF_NONE.get(parameter) if value is None else value
        kind = next((kind for kind in NEVER if isinstance(sample, kind)), None)  # bool stands before int
        for is_valid, table in ((False, NEVER), (True, SOMETIMES)) if kind else ():
            for name, change in table[kind].items():
                if (value is None and name == "None") or f"{parameter}={name}" in subject.allowed:
                    continue
                for everywhere in (False, True) if not is_valid else (False,):
                    yield Difference(parameter, name, functools.partial(_changed, change, sample), is_valid, everywhere)


def _changed(change: Change, sample: Any, value: Any) -> Any:
    return change(sample if value is None else value)


def answer(subject: Subject, drawn: Values, difference: Difference, comm: Any) -> str:
    """Make the call with the difference on this rank.

    Returns:
        Nothing where the result was judged, else how the library refused the call.
    """
    with subject.prepare(comm, drawn) as call:
        if difference.everywhere or comm.rank == comm.size - 1:
            call.arguments[difference.parameter] = difference.change(call.arguments[difference.parameter])
        try:
            result = finished(call())
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
        if difference.is_valid:
            call.judge(result)
    return ""


def alone(subject: Subject, drawn: Values, comm: Any, *, is_extra: bool) -> str:
    """Make a call on the last rank only, or on all but that one, after one that all ranks make; then leave the mesh.

    Returns:
        Nothing where nobody noticed, else the error of this rank.
    """
    try:
        with subject.prepare(comm, drawn) as call:
            finished(call())
            if (comm.rank == comm.size - 1) == is_extra:
                finished(call())
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fault(difference: Difference, answers: Sequence[str]) -> str:
    """Say what is wrong with the answers of all ranks; nothing where all is well."""
    if len(set(answers)) > 1:
        return f"{difference}: ranks are told different things: {answers}"
    if not answers[0] and not difference.is_valid:
        return f"{difference}: accepted"
    if UNCLEAR.search(answers[0]):
        return f"{difference}: unclear: {answers[0]}"
    return ""


def faults(subject: Subject, drawn: Values, comm: Any) -> Iterator[str]:
    """Make the call once for each difference; every rank of a communicator calls this."""
    with subject.prepare(comm, drawn) as call:
        known = list(differences(subject, call.arguments))
    for difference in known:
        yield fault(difference, _gather_texts(comm, answer(subject, drawn, difference, comm)))


def isolated(subject: Subject, drawn: Values) -> Iterator[str]:
    """Make the call once for each difference, each on new threads, so that a hang or a rank left alone spoils no other."""

    def known(comm: Any) -> list[Difference]:
        with subject.prepare(comm, drawn) as call:
            return list(differences(subject, call.arguments))

    for difference in run_threads(subject.ranks(drawn), known)[0]:
        try:
            answers = run_threads(subject.ranks(drawn), functools.partial(answer, subject, drawn, difference), timeout=5)
        except (ThreadsHung, RankFailure) as error:
            yield f"{difference}: {str(error).splitlines()[0]}"
        else:
            yield fault(difference, answers)
