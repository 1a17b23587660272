"""Test that all ranks refuse impossible calls with the same error, before any message is sent.

`test_differing_ranks.py` changes every argument of every call. The rows in `refusals/` are values
that are only wrong together, and calls that only one rank makes.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from refusals import (
    calls,
    config,
    decoders,
    kinds,
    layers,
    models,
    parts,
    pure,
    scheduling,
    training,
)
from refusals.calls import Row, Table, comm_of
from torch import Tensor

import sp_core as sp
from sp_core.arguments import check_tensor
from sp_core.collectives.maps import AllReduce
from sp_core.testing import spmd
from sp_core.testing.comm import LockstepComm

DEVICES = ("cpu", "cuda", "cuda:0", "cuda:1", "meta")


def check_refused(comm: Any, axes: str, row: Row) -> None:
    """Check that all ranks get the same error, that nothing was sent, and the mesh still works."""
    kind, text, wrong = row
    sizes: dict[str, Any] = dict.fromkeys(axes.split(), 2 if " " in axes else comm.size)
    with sp.Mesh(comm, **sizes) as mesh:
        here, counters = comm.rank == comm.size - 1, comm_of(mesh).counters
        with pytest.raises(kind) as caught:
            wrong(mesh, here)
        told = f"{type(caught.value).__name__}: {caught.value}"
        assert comm.allgather(told) == [told] * comm.size
        assert type(caught.value) is kind
        assert text in told
        assert not re.search(r"rank \d+: rank", told)  # also if two axes have agreed
        assert counters.total().bytes_sent == 0
        assert sp.all_reduce(torch.ones(1), comm=comm_of(mesh)).item() == comm.size


def rows(*tables: Table, ranks: int) -> pytest.MarkDecorator:
    """Parametrize by the rows whose mesh has `ranks` ranks; each axis has two ranks."""
    found = {
        f"{axes}: {name}": (axes, row)
        for table in tables
        for axes, named in table.items()
        for name, row in named.items()
        if len(axes.split()) == ranks // 2
    }
    return pytest.mark.parametrize(("axes", "row"), [*found.values()], ids=[*found])


@rows(*(x.EVERYWHERE for x in (calls, kinds, parts, models, decoders, training)), ranks=2)
@spmd(1, 3)
def test_what_is_wrong_everywhere(comm: Any, axes: str, row: Row) -> None:
    check_refused(comm, axes, row)


@rows(*(x.ON_ONE_RANK for x in (calls, kinds, parts, models, decoders, training)), ranks=2)
@spmd(2)
def test_what_is_wrong_on_one_rank_is_raised_on_both(comm: Any, axes: str, row: Row) -> None:
    check_refused(comm, axes, row)


@rows(*(x.ON_ONE_RANK for x in (calls, kinds, models, decoders, training)), ranks=4)
@spmd(4)
def test_what_is_wrong_on_one_rank_of_a_grid_is_raised_on_all(
    comm: Any, axes: str, row: Row
) -> None:
    check_refused(comm, axes, row)


def differing(mine: Any, others: Any) -> Callable[[bool], Any]:
    """Return a function that gives the last rank one argument, and other ranks another."""
    return lambda here: mine if here else others


FAILING = MagicMock(**{"__iter__.side_effect": RuntimeError("out of memory")})
"""Nodes that cannot be read, as a device may fail."""
NO_MESH: list[Any] = [
    (sp.ShapeError, "has 2", {"a": 3}),
    (sp.ShapeError, "sizes >= 1", {"a": 2, "b": 0}),
    (sp.ShapeError, r"no axis was given.*Mesh\(comm, tp=2\)", {}),
    (TypeError, "sp='2' was given; pass a whole number", {"sp": "2"}),
    (TypeError, "kind=2.0 was given; pass a whole number", {"kind": 2.0}),
    (sp.DeviceError, "meta", {"device": "meta", "a": 2}),
    *(
        (sp.DeviceError, f"device={re.escape(repr(wrong))} was given", {"device": wrong, "a": 2})
        for wrong in list[Any](["cpu:1", "", [], 2**70, -(2**70)])
    ),
    (sp.DeviceError, "pigeon", {"transport": "pigeon", "a": 2}),
    (ValueError, "never", {"check": "never", "a": 2}),
    *(
        (ValueError, "there are", {"algorithm": wrong, "a": 2})
        for wrong in ("magic", {"all_reduce": "bruck"}, "all_swap=ring")
    ),
    (sp.CollectiveMismatch, "algorithm", {"algorithm": differing("ring", "auto"), "a": 2}),
    *(
        (ValueError, "one whole number per rank", {"nodes": nodes, "a": 2})
        for nodes in (
            [0],
            [0, 1, 2],
            ["a", "b"],
            ["--3", "1"],
            ["1_0", "1"],
            2,
            np.array(3),
            torch.tensor(3),
        )
    ),
    (RuntimeError, "out of memory", {"nodes": differing(FAILING, None), "a": 2}),
    (sp.CollectiveMismatch, "nodes=", {"nodes": differing([0, 1], [0, 0]), "a": 2}),
    (sp.CollectiveMismatch, "axes", {"a": differing(2, 1), "b": differing(1, 2)}),
    (sp.CollectiveMismatch, "transport=", {"transport": differing("window", "host"), "a": 2}),
    (sp.CollectiveMismatch, "check=", {"check": differing("agree", "off"), "a": 2}),
    (ValueError, "no such file", {"tuning": "/nonexistent/tuning.json", "a": 2}),
    *(
        pytest.param(
            sp.DeviceError,
            text,
            {"device": device, "a": 2},
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA"),
        )
        for text, device in (
            (r"device=0 was given: .*accelerator|no CUDA device", 0),  # as torch is built
            (r"rank 1.*CUDA", differing("cuda", "cpu")),
        )
    ),
]


@pytest.mark.parametrize(("kind", "text", "given"), NO_MESH)
@spmd(2)
def test_a_mesh_that_cannot_be(
    comm: Any, kind: type[Exception], text: str, given: dict[str, Any]
) -> None:
    here = comm.rank == 1
    mine = {name: value(here) if callable(value) else value for name, value in given.items()}
    with pytest.raises(kind, match=text):
        sp.Mesh(comm, **mine)
    if isinstance(comm, LockstepComm):
        members = comm.family.members
        assert [str(made) for made in members if "freed" not in str(made)] == [str(comm)]
    with sp.Mesh(comm, sp=2) as mesh:
        assert sp.all_reduce(torch.ones(1), comm=mesh["sp"]).item() == 2


@pytest.mark.parametrize("ranks", [0, 4])
@spmd(1, 2)
def test_a_mesh_on_one_rank_says_how_to_start_several(comm: Any, ranks: int) -> None:
    with pytest.raises(sp.ShapeError, match=f"has {comm.size}. Choose sizes >= 1") as caught:
        sp.Mesh(comm, sp=ranks)
    told = "Start the program with: sp-core run -n 4 -- python ..." in str(caught.value)
    assert told == (comm.size == 1 < ranks)


@given(tensor=st.sampled_from(DEVICES), wanted=st.sampled_from(DEVICES))
def test_a_tensor_belongs_where_the_communicator_is(tensor: str, wanted: str) -> None:
    """A communicator on "cuda" takes tensors of every GPU; one on "cuda:1" only of that one."""
    x = Mock(Tensor, device=torch.device(tensor), layout=torch.strided, is_nested=False)
    comm: Any = SimpleNamespace(device=torch.device(wanted), name="sp")
    kinds = tensor.partition(":")[0], wanted.partition(":")[0]
    refused = pytest.raises(sp.DeviceError, match=f"tensor is on {tensor}, sp is on {wanted}")
    fits = kinds[0] == kinds[1] and (":" not in wanted or tensor == wanted)
    with nullcontext() if fits else refused:
        check_tensor(x, comm)


@pytest.mark.parametrize(
    ("kind", "text", "call"), [*pure.ROWS, *layers.ROWS, *scheduling.ROWS, *config.ROWS]
)
def test_what_needs_no_ranks_is_refused(
    kind: type[Exception], text: str, call: Callable[[], object]
) -> None:
    with pytest.raises(kind, match=text) as caught:
        call()
    assert type(caught.value) is kind


@spmd()
def test_a_freed_communicator(comm: Any) -> None:
    """A pending call ends. Every new call is refused, even one without an agreement."""
    mesh = sp.Mesh(comm, sp=comm.size)
    pending = sp.all_reduce_start(torch.ones(3), comm=mesh["sp"])
    gather = partial(sp.all_gather, torch.ones(2), comm=mesh["sp"])
    agreed = partial(AllReduce(mesh["sp"], algorithm="ring").run, torch.ones(2))
    counters = mesh["sp"].counters
    mesh.free()
    mesh.free()
    assert pending.wait().tolist() == [float(comm.size)] * 3
    counters.reset()
    for use in (gather, agreed, lambda: mesh["sp"]):
        with pytest.raises(sp.RankError, match="freed"):
            use()
    assert counters.total().calls == 0
