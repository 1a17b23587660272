"""Change an argument on one rank or on all, to another valid value or to an invalid one."""

import functools
import math
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

import sp_core as sp
from domains.declared import Call, Subject, Values
from domains.trial import REFUSALS, finished
from sp_core.llama import LlamaConfig, Sampling
from sp_core.scheduling import Assignment, gpipe
from sp_core.testing import run_threads
from sp_core.testing.outcome import RankFailure
from sp_core.testing.run import ThreadsHung

Change = Callable[[Any], Any]

NEVER: dict[Any, dict[str, Change]] = {
    Tensor: {
        "None": lambda x: None,
        "a number": lambda x: 3.0,
        "a list": lambda x: x.tolist(),
        "sparse": lambda x: x.detach().to_sparse(),
        "on another device": lambda x: x.detach().to("meta"),
        "complex": lambda x: x.detach().to(torch.complex64),
    },
    bool: {
        "text": lambda x: "no",
        "None": lambda x: None,
        "2": lambda x: 2,
        "a tensor": lambda x: torch.ones(2),
    },
    int: {
        "a fraction": lambda x: x + 0.5,
        "a float": float,
        "text": str,
        "None": lambda x: None,
        "far out": lambda x: 10**12,
        "a tensor": lambda x: torch.ones(2),
    },
    float: {
        "nan": lambda x: math.nan,
        "infinity": lambda x: math.inf,
        "text": str,
        "a list": lambda x: [x],
    },
    str: {"unknown": lambda x: "magic", "None": lambda x: None, "a number": lambda x: 3},
    tuple: {
        "a number": lambda x: 3,
        "text": lambda x: "abc",
        "too many": lambda x: (*x, *x),
        "fractions": lambda x: tuple(0.5 for _ in x),
    },
    list: {
        "a number": lambda x: 3,
        "None among them": lambda x: [*x, None],
        "None": lambda x: None,
        "a tensor": lambda x: x[0],
    },
    sp.Mask: {"True": lambda x: True, "a tensor": lambda x: torch.ones(2, 2), "text": str},
    sp.Sharding: {
        "None": lambda x: None,
        "a number": lambda x: 3,
        "for more ranks": lambda x: sp.Sharding.contiguous(x.seq_len, x.size + 1),
        "for more tokens": lambda x: sp.Sharding.contiguous(x.seq_len + x.size, x.size),
    },
    torch.dtype: {"text": str, "a number": lambda x: 3},
    Path: {
        "a number": lambda x: 3,
        "a file": lambda x: Path(__file__),
        "below a file": lambda x: Path(__file__) / "model",
    },
    LlamaConfig: {"None": lambda x: None, "a dict": LlamaConfig.to_dict},
    **{key: {"a number": lambda x: 0.5, "text": str} for key in (Sampling, torch.Generator)},
    Assignment: {
        "None": lambda x: None,
        "lengths": lambda x: x.lengths,
        "for more": lambda x: replace(x, packed=(*x.packed, ())),
    },
    Optimizer: {"None": lambda x: None, "its class": type},
    lr_scheduler.LRScheduler: {"a number": lambda x: 3, "its class": type},
    **{key: {"a number": lambda x: 3, "text": str} for key in (Tokenizer, Callable)},
}
"""Changes to a value that is never valid, by the type of the valid value."""

SOMETIMES: dict[Any, dict[str, Change]] = {
    Tensor: {
        "another dtype": lambda x: x.detach().to(
            torch.float32 if x.dtype != torch.float32 else torch.float64
        ),
        "longer at the end": lambda x: torch.cat([x.detach()] * 2, -1),
        "one dim more": lambda x: x.detach()[None],
        "another gradient": lambda x: x.detach().requires_grad_(
            x.is_floating_point() and not x.requires_grad
        ),
    },
    bool: {"the other": lambda x: not x},
    int: {"one more": lambda x: x + 1, "one less": lambda x: x - 1},
    float: {"twice": lambda x: 2 * x, "None": lambda x: None},
    str: {"auto": lambda x: "auto", "ring": lambda x: "ring", "max": lambda x: "max"},
    tuple: {"None": lambda x: None, "in another order": lambda x: x[::-1]},
    list: {"one less": lambda x: x[:-1], "in another order": lambda x: x[::-1]},
    sp.Mask: {
        "None": lambda x: None,
        "causal": lambda x: sp.Mask(causal=not x.causal),
        "a window": lambda x: sp.Mask(window=3),
    },
    sp.Sharding: {
        "another layout": lambda x: sp.Sharding.striped(x.seq_len, x.size),
        "another start": lambda x: sp.Sharding.contiguous(x.seq_len, x.size, start=5),
    },
    torch.dtype: {
        "None": lambda x: None,
        "another": lambda x: torch.float64 if x == torch.float32 else torch.float32,
    },
    Path: {"text": str, "another": lambda x: x.with_name("another")},
    LlamaConfig: {"a layer more": lambda x: replace(x, num_hidden_layers=x.num_hidden_layers + 1)},
    Sampling: {"None": lambda x: None, "another seed": lambda x: Sampling(1.0, seed=x.seed + 1)},
    Assignment: {
        "all shared": lambda x: Assignment(x.lengths, tuple(range(len(x.lengths))), ((),) * x.size)
    },
    **{key: {"None": lambda x: None} for key in (Optimizer, lr_scheduler.LRScheduler, Tokenizer)},
    torch.Generator: {"another state": lambda x: torch.Generator().manual_seed(5)},
    Callable: {
        "None": lambda x: None,
        "gpipe": lambda x: gpipe,
        "contiguous": lambda x: sp.Sharding.contiguous,
    },
}
"""Changes to a value that is valid for some calls, by the type of the valid value."""

GIVEN_INSTEAD_OF_NONE = {
    "mask": sp.Mask(),
    **dict.fromkeys(("softmax_scale", "softcap"), 0.5),
    **dict.fromkeys(("sinks", "alibi", "head"), torch.ones(5)),
    # unchecked, a rank that alone gives the true lengths waits for one that asks for them
    **dict.fromkeys(("sizes", "split_sizes", "concat_sizes"), (70, 50)),
    "documents": (0, 4),
    "scheme": "ring",
    "inner": sp.local_attention,
    "stop": (2, 3),
    **dict.fromkeys(("count", "window", "chunk"), 3),
    "max_file_bytes": 1000,
    "on_token": print,
    "tokenizer": "of bytes",
    "scheduler": lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)])),
    "generator": torch.Generator(),
}
"""A valid value of each parameter that may be None; its type decides which changes are tried."""

ASKED = ("comm", "mesh", "model", "tensor", "data", "stages")
"""Parameters through which ranks communicate: a wrong one is an error of its own rank only."""

NEVER_ASKED: dict[str, Change] = {
    "None": lambda x: None,
    "a number": lambda x: 3,
    "text": lambda x: "ring",
}

UNCHECKED = {"(check)": "off", "(transport)": "host"}
"""Factors of a mesh without agreement. In shared memory only the watchdog notices a deadlock."""

NOT_COMPARED = {
    "cost.": "a formula: nothing is sent",
    "sp-core ": "all ranks of a command get one command line",
}
"""Beginnings of names of calls that do not check if the ranks agree, each with the reason."""

UNCLEAR = re.compile(
    r"has no attribute|object is not|not subscriptable|unsupported operand|"
    r"not supported between|'NoneType' object"
)
"""Python's own error texts, which do not say what the caller has to do."""


@dataclass(frozen=True)
class Difference:
    """Describe one changed argument.

    Attributes:
        parameter: the parameter whose value is changed.
        name: the change's name.
        change: makes the changed value from the valid one.
        is_valid: whether the changed value may be valid, so that the call may succeed.
        everywhere: whether every rank has the changed value, or the last rank only.
        is_told: whether all ranks must get the error if the last rank alone has a wrong value.
    """

    parameter: str
    name: str
    change: Change
    is_valid: bool
    everywhere: bool
    is_told: bool = True

    def __str__(self) -> str:
        return f"{self.parameter}={self.name} on {'every rank' if self.everywhere else 'one rank'}"


def compared(subjects: Iterable[Subject]) -> list[Subject]:
    """Return the calls in which the ranks check that they agree on the arguments."""
    return [
        subject
        for subject in subjects
        if subject.ranks(subject.draw(subject.base, 1)) > 1
        and not subject.alone
        and not subject.name.startswith(tuple(NOT_COMPARED))
    ]


def differences(subject: Subject, arguments: Values) -> Iterator[Difference]:
    """Yield every change of every argument on one rank, and the invalid ones also on all ranks."""
    given = GIVEN_INSTEAD_OF_NONE | {"kv_sharding": arguments.get("sharding")}
    for parameter, value in arguments.items():
        sample = given.get(parameter) if value is None else value
        is_asked = parameter in ASKED
        # bool is listed before int, because it is a subclass of int
        kind = next((kind for kind in NEVER if isinstance(sample, kind)), None)
        tables = (
            (NEVER_ASKED, {}) if is_asked else (NEVER[kind], SOMETIMES[kind]) if kind else ({}, {})
        )
        for is_valid, table in zip((False, True), tables, strict=True):
            for name, change in table.items():
                if (value is None and name == "None") or f"{parameter}={name}" in subject.allowed:
                    continue
                for everywhere in (False, True) if not is_valid else (False,):
                    changed = functools.partial(_changed, change, sample)
                    yield Difference(
                        parameter, name, changed, is_valid, everywhere, everywhere or not is_asked
                    )


def _changed(change: Change, sample: Any, value: Any) -> Any:
    return change(sample if value is None else value)


def outcome(call: Call, difference: Difference, comm: Any) -> str:
    """Make the call with the difference on this rank.

    Returns:
        The error with which the library refused the call, or an empty text.
    """
    if difference.everywhere or comm.rank == comm.size - 1:
        changed = difference.change(call.arguments[difference.parameter])
        # a new dict, because `judge` holds the old one: it compares with what the other ranks pass
        call.arguments = call.arguments | {difference.parameter: changed}
    try:
        result = finished(call())
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    if difference.is_valid:
        call.judge(result)
    return ""


def alone(subject: Subject, drawn: Values, comm: Any, *, is_extra: bool) -> str:
    """Make a call on all ranks, then once more on the last rank only or on all but the last.

    Returns:
        The error of this rank, or an empty text if it had none.
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
    """Return what is wrong with the answers of all ranks, or an empty text."""
    if len(set(answers)) > 1:
        return f"{difference}: ranks are told different things: {answers}"
    if not answers[0] and not difference.is_valid:
        return f"{difference}: accepted"
    if UNCLEAR.search(answers[0]):
        return f"{difference}: unclear: {answers[0]}"
    return ""


def known(subject: Subject, call: Call) -> list[Difference]:
    """Return every difference of a call, and check that every argument has one."""
    found = list(differences(subject, call.arguments))
    missing = call.arguments.keys() - {difference.parameter for difference in found}
    assert not missing, f"{subject.name} has no other values for {missing}"
    return found


def known_of(subject: Subject) -> list[Difference]:
    """Return every difference of the call in the base row."""

    def body(comm: Any) -> list[Difference]:
        with subject.prepare(comm, drawn) as call:
            return known(subject, call)

    drawn = subject.draw(subject.base, 1)
    return run_threads(subject.ranks(drawn), body)[0]


def faults(subject: Subject, drawn: Values, comm: Any, sample: int = sys.maxsize) -> Iterator[str]:
    """Make the call with each difference, and yield what is wrong. Every rank calls this.

    Invalid calls follow each other on one mesh, and a valid call after them must succeed. Of the
    differences that may be valid, a random sample is tried, each on a new mesh.
    """
    with subject.prepare(comm, drawn) as call:
        given = call.arguments
        told = [difference for difference in known(subject, call) if difference.is_told]
        for difference in told:
            if not difference.is_valid:
                call.arguments = dict(given)
                yield fault(difference, comm.allgather(outcome(call, difference, comm)))
        call.arguments = given
        call.judge(finished(call()))
    valid = [difference for difference in told if difference.is_valid]
    for difference in random.Random(subject.name).sample(valid, min(sample, len(valid))):
        with subject.prepare(comm, drawn) as call:
            answer = outcome(call, difference, comm)
        yield fault(difference, comm.allgather(answer))


def unchecked(subject: Subject, difference: Difference) -> str:
    """Make the call with the difference on a mesh with `check="off"`.

    Returns:
        What is wrong; an empty text if a rank has an error or all have the documented result.
    """
    drawn = subject.draw(subject.base | UNCHECKED, 1)
    try:
        answers = run_threads(
            subject.ranks(drawn), functools.partial(judged, subject, drawn, difference), timeout=60
        )
    except ThreadsHung as error:
        return f"{difference}, unchecked: {str(error).splitlines()[0]}"
    except RankFailure:  # an error, or the report of a deadlock
        return ""
    told = set(answers) - {""}
    is_wrong = bool(told) or not difference.is_valid
    is_refused = any(not answer.startswith("wrong") for answer in told)
    if not is_wrong or is_refused or difference.name in subject.own_results:
        return ""
    return f"{difference}, unchecked: {min(told, default='accepted')}"


def every_difference(subject: Subject) -> dict[str, Any]:
    """Try every difference of a call on threads, with agreement and with `check="off"`.

    Returns:
        The numbers of arguments and of differences tried, "compared" with agreement and "unchecked"
        without, and the "faults". The numbers are 0 if the call's ranks do not agree on arguments.
    """
    if not compared([subject]):
        return {"arguments": 0, "compared": 0, "unchecked": 0, "faults": []}
    every, drawn = known_of(subject), subject.draw(subject.base, 1)
    found = run_threads(
        subject.ranks(drawn), lambda comm: list(faults(subject, drawn, comm)), timeout=600
    )[0]
    off = [unchecked(subject, difference) for difference in every if "(check)" in subject.factors]
    return {
        "arguments": len({difference.parameter for difference in every}),
        "compared": len(found),
        "unchecked": len(off),
        "faults": list(filter(None, found + off)),
    }


class Left(Exception):
    """Report nothing: `judged` raises this to leave a mesh, so that the engine finds a deadlock."""


def judged(subject: Subject, drawn: Values, difference: Difference, comm: Any) -> str:
    """Make the calls on a mesh; return what `outcome` says, or "wrong: ..." for a wrong result.

    The mesh is left by an error, so that a rank that still waits in it is found.
    """
    told = ""
    with suppress(Left), subject.prepare(comm, drawn) as call:
        try:
            told = outcome(call, difference, comm)
        except AssertionError as error:
            told = f"wrong: {error}"
        raise Left
    return told
