"""Test which values an argument accepts, by its name, and the errors for other values."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sp_core as sp
from sp_core import arguments
from sp_core.collectives.build import KINDS, NEEDED
from sp_core.kinds import RULES

OPTIMIZER = torch.optim.SGD([torch.ones(1)])
VALUES: dict[str, Any] = {
    "none": None,
    "flag": True,
    "zero": 0,
    "minus": -1,
    "numpy": np.int64(3),
    "half": 0.5,
    "narrow": np.float16(0.5),
    "endless": math.inf,
    "nan": math.nan,
    "empty": "",
    "word": "ab",
    "path": Path(),
    "mapping": {"ab": 1},
    "words": ["ab"],
    "blanks": ["ab", ""],
    "list": [],
    "wholes": [1, 2],
    "tuple": (1,),
    "range": range(2),
    "set": {1},
    "flags": [True],
    "halves": [0.5, np.float16(0.5)],
    "lists": [[1], []],
    "halves_in_lists": [[0.5]],
    "all_endless": [math.inf],
    "tensor": torch.ones(2),
    "iterator": iter([1]),
    "function": print,
    "class": torch.optim.SGD,
    "optimizer": OPTIMIZER,
    "scheduler": torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1),
    "generator": torch.Generator(),
    "tokenizer": SimpleNamespace(to_str=print),
    "comm": SimpleNamespace(Split=print),
    "null": type("Null", (), {"Split": print, "__bool__": lambda self: False})(),
    "rope": sp.Rope(4),
}
SEQUENCES = "words blanks list wholes tuple range flags halves lists halves_in_lists all_endless"
TAKEN = {
    "dim": "zero minus numpy",
    "sizes": "none list wholes tuple range",
    "tokens": "list lists",
    "causal": "flag",
    "op": "empty word",
    "q_positions": f"none {SEQUENCES} mapping set tensor",
    "place": f"{SEQUENCES} mapping set tensor",
    "stop": "list wholes tuple range set",
    "stop_strings": "words list",
    "shape": "list wholes tuple range",
    "batches": SEQUENCES,
    "tensors": SEQUENCES.replace("range ", ""),
    "positions": "list lists halves_in_lists words blanks",
    "groups": "list lists",
    "count": "none zero minus numpy",
    "room": "list wholes tuple range",
    "max_tokens": "zero numpy",
    "pass_tokens": "numpy",
    "top_k": "none numpy",
    "window": "none numpy",
    "micro_batches": "none numpy",
    "max_file_bytes": "none numpy",
    "p": "zero minus numpy half narrow endless nan",
    "temperature": "zero numpy half narrow",
    "dropout": "zero half narrow",
    "base": "numpy half narrow",
    "tolerance": "numpy half narrow endless",
    "top_p": "none half narrow",
    "rms_norm_eps": "zero half",
    "rope_theta": "half",
    "cost": "zero numpy half narrow",
    "unit": "numpy half narrow",
    "layers": "list wholes tuple range halves all_endless",
    "lengths": "list wholes tuple range",
    "packed": "list lists",
    "folder": "empty word path",
    "tokenizer": "none tokenizer",
    "comm": "comm",
    "parameters": f"empty word mapping set tensor iterator {SEQUENCES}",
    "scheduler": "none scheduler",
    "generator": "none generator",
    "optimizer": "optimizer",
    "layout": "function class",
    "ordering": "function class",
    "on_token": "none function class",
    "softmax_scale": "none zero minus numpy half narrow",
    "softcap": "none numpy half narrow",
    "sinks": "none tensor",
    "alibi": "none list wholes tuple range halves",
    "inner": "none function class",
    "attention": "function class",
    "rope": "none rope",
    "scaling": "none mapping",
}
"""The names of the values that each argument accepts, by the argument's name. One argument stands
for all that have the same check."""


def is_taken(name: str, value: object) -> bool:
    try:
        arguments.check(**{name: value})
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", TAKEN)
def test_an_argument_takes_these_values(name: str) -> None:
    taken = {kind for kind, value in VALUES.items() if is_taken(name, value)}
    assert taken == {*TAKEN[name].split()}


def test_every_check_is_among_them() -> None:
    assert {RULES[name] for name in TAKEN} == {*RULES.values()}


X = torch.ones(2, 3)
HERE: Any = SimpleNamespace(device=torch.device("cpu"), name="ring", agree_on=print)
HALF: Any = 0.5
ANY_LIST: Any = [1]
NONE: Any = None
DTensor = type("DTensor", (torch.Tensor,), {})
FLOATS = torch.float32, torch.float64
SAID: list[tuple[Callable[[], object], Exception | None]] = [
    (lambda: arguments.check(dim=1, op="x"), None),
    (
        lambda: arguments.check(dim=1, op=X),
        TypeError("op=tensor of shape (2, 3) was given; pass a name."),
    ),
    (
        lambda: arguments.check(folder="a\0"),
        TypeError(
            "folder='a\\x00' was given; pass a name or a Path in UTF-8, without the character \\0."
        ),
    ),
    (
        lambda: arguments.check(folder="a\ud800"),
        TypeError("folder='a\\ud800' was given; pass a name or a Path in UTF-8"),
    ),
    (
        lambda: arguments.check(folder=Path("a\udcff")),
        TypeError("folder=PosixPath('a\\udcff') was given; pass a name or a Path in UTF-8"),
    ),
    (lambda: arguments.check(dim="x" * 78), TypeError(f"dim={'x' * 78!r} was given; pass")),
    (lambda: arguments.check(softmax_scale=torch.finfo(torch.float32).max), None),
    (lambda: arguments.check(softmax_scale=-torch.finfo(torch.float32).tiny), None),
    (
        lambda: arguments.check(softmax_scale=1e-46),
        TypeError(
            "softmax_scale=1e-46 was given; pass 0, a number from 1.2e-38 to 3.4e38 in magnitude, "
            "or None for 1/sqrt(head_dim)."
        ),
    ),
    (lambda: arguments.check_positive(chunk=None, count=1), None),
    (lambda: arguments.check_positive(chunk=2**62), None),
    (
        lambda: arguments.check_positive(chunk=2**62 + 1),
        ValueError(f"chunk={2**62 + 1} was given; pass a whole number from 1 to 2**62."),
    ),
    (
        lambda: arguments.check_positive(count=1, chunk=0),
        ValueError("chunk=0 was given; pass a whole number from 1 to 2**62."),
    ),
    (
        lambda: arguments.check_positive(chunk=HALF),
        TypeError("chunk=0.5 was given; pass a whole number"),
    ),
    (lambda: arguments.check_type("x", 1, int, ""), None),
    (
        lambda: arguments.check_type("x", X, int, "Count."),
        TypeError("x=tensor of shape (2, 3) was given; a int is needed. Count."),
    ),
    (lambda: arguments.check_communicator(HERE), None),
    (
        lambda: arguments.check_communicator("a" * 79, "group"),
        TypeError(f"group=str '{'a' * 59}... was given; a Communicator is needed. Pass one of"),
    ),
    (
        lambda: arguments.check_type("x", 3, OSError, "Raise one."),
        TypeError("x=3 was given; an OSError is needed. Raise one."),
    ),
    (
        lambda: sp.plan("", X, comm=ANY_LIST),
        TypeError("comm=[1] was given; a Communicator is needed. Pass one of"),
    ),
    *(
        (call, TypeError("comm=None was given; a Communicator is needed. Pass one of"))
        for call in (lambda: sp.fence(comm=NONE), lambda: sp.peer(X, 0, comm=NONE))
    ),
    (lambda: arguments.check_tensor(X, HERE, dtypes=FLOATS), None),
    (lambda: arguments.check_tensor(X, HERE), None),
    (
        lambda: arguments.check_tensor(ANY_LIST, HERE, "q"),
        sp.errors.DtypeError("q must be a tensor, list was given. Pass torch.as_tensor(...) of it"),
    ),
    (
        lambda: arguments.check_tensor(X.as_subclass(DTensor), HERE, "q"),
        sp.errors.DtypeError("q is a DTensor, whose own layout may differ from the sharding."),
    ),
    (
        lambda: arguments.check_tensor(X.to("meta"), HERE, "q"),
        sp.DeviceError(
            "q is on meta, ring is on cpu. Make it with device=mesh.device, or the mesh with"
        ),
    ),
    (
        lambda: arguments.check_tensor(X.to_sparse(), HERE, "q"),
        sp.ShapeError("q has layout torch.sparse_coo; a dense one is needed. Pass x.to_dense()."),
    ),
    (
        lambda: arguments.check_tensor(X.int(), HERE, "q", FLOATS),
        sp.errors.DtypeError("q has dtype torch.int32; needed is one of float32, "),
    ),
]


@pytest.mark.parametrize(("call", "error"), SAID)
def test_one_value_is_taken_or_refused_with_these_words(call: Any, error: Exception | None) -> None:
    if error is None:
        call()
        return
    with pytest.raises(type(error)) as caught:
        call()
    assert type(caught.value) is type(error)
    assert str(caught.value).startswith(str(error))


@pytest.mark.parametrize(
    "name",
    ["gather_replicated", *(name for name in dir(sp) if name.removesuffix("_start") in KINDS)],
)
def test_a_plan_and_a_start_fill_in_what_the_function_does(name: str) -> None:
    op = "all_gather" if name == "gather_replicated" else name.removesuffix("_start")
    given = inspect.signature(getattr(sp, name)).parameters.values()
    found = {each.name: NEEDED if each.default is each.empty else each.default for each in given}
    assert found == KINDS[op].arguments | {"x": NEEDED, "comm": NEEDED, "algorithm": "auto"}
