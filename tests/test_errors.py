"""Bad input raises one named error on every rank before any message."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, strategies as st

import sp_core as sp
from sp_core.arguments import check, check_tensor
from sp_core.testing import spmd

B, S, H, K, D = 2, 12, 4, 2, 8
DEVICES = ("cpu", "cuda", "cuda:0", "cuda:1", "meta")
Wrong = Callable[[sp.Communicator], object]


def attention(
    comm: sp.Communicator, *, heads: int = H, kv_heads: int = K, seq: int = S, **changes: Any
) -> Any:
    """A valid call of a scheme, with changes."""
    sharding = changes.pop("sharding", sp.Sharding.contiguous(S, comm.size))
    scheme = changes.pop("scheme", sp.allgather_kv_attention)
    local = sp.Sharding.contiguous(seq, comm.size).local_len(comm.rank)
    tensors = {
        "q": torch.ones(B, local, heads, D),
        "k": torch.ones(B, local, kv_heads, D),
        "v": torch.ones(B, local, kv_heads, D),
    }
    tensors.update(
        {name: changes.pop(name)(tensors[name]) for name in list(changes) if name in tensors}
    )
    return scheme(**tensors, comm=comm, sharding=sharding, **changes)


def only_on_last(
    change: Callable[[torch.Tensor], Any],
) -> Callable[[sp.Communicator], Callable[[torch.Tensor], Any]]:
    return lambda comm: change if comm.rank == comm.size - 1 else lambda x: x


def layer(
    comm: sp.Communicator, change: Callable[[torch.Tensor], Any], ranks: int | None = None
) -> object:
    block = sp.TransformerBlock(8, 2, rope=sp.Rope(4), comm=comm)
    x = torch.ones(1, sp.Sharding.contiguous(S, comm.size).local_len(comm.rank), 8)
    return block.attention(change(x), sharding=sp.Sharding.contiguous(S, ranks or comm.size))


def differing(comm: sp.Communicator, value: int) -> int:
    return value + (comm.rank == comm.size - 1)


EVERYWHERE: dict[str, tuple[type[Exception], str, Wrong]] = {
    "heads that do not divide": (sp.ShapeError, "heads", lambda c: attention(c, heads=5)),
    "a mask for another length": (
        sp.ShapeError,
        "13",
        lambda c: attention(c, mask=sp.Mask(documents=(0, 5, 13))),
    ),
    "a sharding for another length": (
        sp.ShapeError,
        "12",
        lambda c: attention(c, seq=S + 2 * c.size),
    ),
    "a sharding for more ranks": (
        sp.ShapeError,
        "ranks",
        lambda c: attention(c, sharding=sp.Sharding.contiguous(S, c.size + 1)),
    ),
    "integers": (
        sp.DtypeError,
        "int64",
        lambda c: attention(c, q=lambda x: x.long(), k=lambda x: x.long(), v=lambda x: x.long()),
    ),
    "two dtypes": (sp.DtypeError, "float64", lambda c: attention(c, q=lambda x: x.double())),
    "three dims": (sp.ShapeError, "B, S", lambda c: attention(c, q=lambda x: x[0])),
    "no tensor": (sp.DtypeError, "list", lambda c: attention(c, v=lambda x: x.tolist())),
    "another device": (sp.DeviceError, "meta", lambda c: attention(c, k=lambda x: x.to("meta"))),
    "a sum elsewhere": (
        sp.DeviceError,
        "the tensor is on meta",
        lambda c: sp.all_reduce(torch.ones(2, device="meta"), comm=c),
    ),
    "a gathered list": (sp.DtypeError, "list", lambda c: sp.all_gather([1.0], comm=c)),  # type: ignore[arg-type]
    "a dim that is not there": (
        sp.ShapeError,
        "dim 3",
        lambda c: sp.all_gather(torch.ones(2), comm=c, dim=3),
    ),
    "sizes that do not add up": (
        sp.ShapeError,
        "adds up",
        lambda c: sp.reduce_scatter(torch.ones(9), comm=c, sizes=[1] * c.size),
    ),
    "too many sizes": (
        sp.ShapeError,
        "one per rank",
        lambda c: sp.all_gather(torch.ones(1), comm=c, sizes=[1] * (c.size + 1)),
    ),
    "a complex sum": (
        sp.DtypeError,
        "complex64",
        lambda c: sp.all_reduce(torch.ones(2, dtype=torch.complex64), comm=c),
    ),
    "a sum of bools": (
        sp.DtypeError,
        "bool",
        lambda c: sp.all_reduce(torch.ones(2, dtype=torch.bool), comm=c),
    ),
    "an unknown algorithm": (
        ValueError,
        "magic",
        lambda c: sp.all_gather(torch.ones(2), comm=c, algorithm="magic"),
    ),
    "an unknown reduction": (
        ValueError,
        "prod",
        lambda c: sp.all_reduce(torch.ones(2), comm=c, op="prod"),
    ),
    "a gradient of max": (
        ValueError,
        "max",
        lambda c: sp.all_reduce(torch.ones(2, requires_grad=True), comm=c, op="max"),
    ),
    "a root that is not there": (
        sp.ShapeError,
        "root=9",
        lambda c: sp.broadcast(torch.ones(2), comm=c, root=9),
    ),
    "one dim twice": (
        sp.ShapeError,
        "different",
        lambda c: sp.all_to_all(torch.ones(4, 4), comm=c, split_dim=0, concat_dim=-2),
    ),
}

ON_ONE_RANK: dict[str, tuple[type[Exception], str, Wrong]] = {
    "another shape": (
        sp.CollectiveMismatch,
        "rank",
        lambda c: sp.all_reduce(torch.ones(differing(c, 3)), comm=c),
    ),
    "another dtype": (
        sp.CollectiveMismatch,
        "float64",
        lambda c: sp.all_gather(only_on_last(lambda x: x.double())(c)(torch.ones(2)), comm=c),
    ),
    "a twin with another gradient": (
        sp.CollectiveMismatch,
        "copy_to_group",
        lambda c: (sp.copy_to_group if c.rank else sp.all_reduce)(torch.ones(2), comm=c),
    ),
    "a twin of the sum": (
        sp.CollectiveMismatch,
        "reduce_from_group",
        lambda c: (sp.reduce_from_group if c.rank else sp.all_reduce)(torch.ones(2), comm=c),
    ),
    "a twin of the gather": (
        sp.CollectiveMismatch,
        "gather_replicated",
        lambda c: (sp.gather_replicated if c.rank else sp.all_gather)(torch.ones(2), comm=c),
    ),
    "a non-blocking twin": (
        sp.CollectiveMismatch,
        "all_gather_start",
        lambda c: (sp.all_gather_start if c.rank else sp.all_gather)(torch.ones(2), comm=c),
    ),
    "no sharding": (
        TypeError,
        "a Sharding is needed",
        lambda c: attention(c, sharding=None if c.rank else sp.Sharding.contiguous(S, c.size)),
    ),
    "sizes that are no list": (
        TypeError,
        "sizes=2 was given",
        lambda c: sp.all_gather(torch.ones(2), comm=c, sizes=2 if c.rank else None),
    ),  # type: ignore[arg-type]
    "hidden size of a layer": (
        sp.ShapeError,
        "hidden size 8",
        lambda c: layer(c, lambda x: x[..., : 8 - (c.rank == c.size - 1)]),
    ),
    "dtype of a layer": (
        sp.DtypeError,
        "float64",
        lambda c: layer(c, only_on_last(lambda x: x.double())(c)),
    ),
    "tokens of a layer": (
        sp.ShapeError,
        "is needed",
        lambda c: layer(c, only_on_last(lambda x: x[:, 1:])(c)),
    ),
    "sharding of a layer": (
        sp.ShapeError,
        "ranks",
        lambda c: layer(c, lambda x: x, c.size - (c.rank == c.size - 1)),
    ),
    "another root": (
        sp.CollectiveMismatch,
        "root",
        lambda c: sp.broadcast(torch.ones(2), comm=c, root=differing(c, 0)),
    ),
    "another collective": (
        sp.CollectiveMismatch,
        "all_gather",
        lambda c: (sp.all_gather if c.rank else sp.reduce_scatter)(torch.ones(2), comm=c),
    ),
    "other sizes": (
        sp.CollectiveMismatch,
        "sizes",
        lambda c: sp.reduce_scatter(
            torch.ones(2 * c.size),
            comm=c,
            sizes=[1, 3] + [2] * (c.size - 2) if c.rank else [2] * c.size,
        ),
    ),
    "a gradient on one rank": (
        sp.CollectiveMismatch,
        "requires_grad",
        lambda c: sp.all_reduce(torch.ones(2, requires_grad=c.rank == 0), comm=c),
    ),
    "heads of q": (
        sp.CollectiveMismatch,
        "rank",
        lambda c: attention(c, heads=H * differing(c, 1)),
    ),
    "a bad dtype": (
        sp.DtypeError,
        "int64",
        lambda c: attention(c, q=only_on_last(lambda x: x.long())(c)),
    ),
    "a bad device": (
        sp.DeviceError,
        "meta",
        lambda c: attention(c, q=only_on_last(lambda x: x.to("meta"))(c)),
    ),
    "a mask": (
        sp.CollectiveMismatch,
        "causal",
        lambda c: attention(c, mask=sp.Mask(causal=c.rank == 0)),
    ),
    "a scale": (
        sp.CollectiveMismatch,
        "softmax_scale",
        lambda c: attention(c, softmax_scale=float(differing(c, 1))),
    ),
    "a softcap": (
        sp.CollectiveMismatch,
        "softcap",
        lambda c: attention(c, softcap=float(differing(c, 1))),
    ),
    "a term that there is not": (
        TypeError,
        "softcup",
        lambda c: attention(c, **({"softcup": 1.0} if c.rank == c.size - 1 else {})),
    ),
    "a layout": (
        sp.CollectiveMismatch,
        "#",
        lambda c: attention(
            c, sharding=(sp.Sharding.zigzag if c.rank else sp.Sharding.contiguous)(S, c.size)
        ),
    ),
    "a scheme": (
        sp.CollectiveMismatch,
        "ring_attention",
        lambda c: attention(c, scheme=sp.ring_attention if c.rank else sp.allgather_kv_attention),
    ),
    "tensors of a layer": (
        sp.CollectiveMismatch,
        "copy_all_to_group",
        lambda c: sp.copy_all_to_group([torch.ones(differing(c, 2))], comm=c),
    ),
}


def expect(comm: sp.Communicator, kind: type[Exception], text: str, wrong: Wrong) -> str:
    """The call raises exactly `kind` with `text` in it; afterwards the communicator still works."""
    sent = comm.counters.total().bytes_sent
    with pytest.raises(kind) as caught:
        wrong(comm)
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert comm.counters.total().bytes_sent == sent
    assert sp.all_reduce(torch.ones(1), comm=comm).item() == comm.size
    return str(caught.value)


@pytest.mark.parametrize("case", sorted(EVERYWHERE))
@spmd()
def test_what_is_wrong_everywhere(comm: Any, case: str) -> None:
    with sp.Mesh(comm, sp=comm.size) as mesh:
        expect(mesh["sp"], *EVERYWHERE[case])


@pytest.mark.parametrize("case", sorted(ON_ONE_RANK))
@spmd(2, 3, 4)
def test_what_is_wrong_on_one_rank_is_raised_on_all(comm: Any, case: str) -> None:
    with sp.Mesh(comm, sp=comm.size) as mesh:
        text = expect(mesh["sp"], *ON_ONE_RANK[case])
        everyone = comm.allgather(text)
        assert everyone == [text] * comm.size


@pytest.mark.parametrize(
    ("collective", "sizes"),
    [
        *(
            (name, "sizes")
            for name in ("all_gather", "gather_replicated", "reduce_scatter", "shift")
        ),
        *(("all_to_all", name) for name in ("split_sizes", "concat_sizes")),
    ],
)
@spmd(1, 3)
def test_sizes_are_those_of_the_tensors_of_all_ranks(
    comm: Any, collective: str, sizes: str
) -> None:
    dims = {"split_dim": 0, "concat_dim": 1} if collective == "all_to_all" else {}
    with sp.Mesh(comm, sp=comm.size) as mesh:
        for wrong in ([1] * comm.size, [9] * (comm.size + 1), [-9] + [9] * (comm.size - 1), []):
            call = partial(getattr(sp, collective), torch.ones(9, 9), **dims, **{sizes: wrong})
            expect(mesh["sp"], sp.ShapeError, f"{sizes}=", lambda c, call=call: call(comm=c))


@spmd()
def test_a_mesh_that_does_not_fit(comm: Any) -> None:
    for axes, text in (
        ({"sp": comm.size + 1}, f"has {comm.size}"),
        ({"a": comm.size, "b": 0}, "sizes >= 1"),
        ({}, "no axes"),
    ):
        with pytest.raises(sp.ShapeError, match=text):
            sp.Mesh(comm, **axes)
    with pytest.raises(sp.DeviceError, match="meta"):
        sp.Mesh(comm, device="meta", sp=comm.size)
    with pytest.raises(sp.DeviceError, match="pigeon"):
        sp.Mesh(comm, transport="pigeon", sp=comm.size)
    with pytest.raises(ValueError, match="never"):
        sp.Mesh(comm, check="never", sp=comm.size)  # type: ignore[arg-type]
    with sp.Mesh(comm, sp=comm.size) as mesh:
        assert sp.all_reduce(torch.ones(1), comm=mesh["sp"]).item() == comm.size


@given(tensor=st.sampled_from(DEVICES), wanted=st.sampled_from(DEVICES))
def test_a_tensor_belongs_where_the_communicator_is(tensor: str, wanted: str) -> None:
    """A communicator whose device has no number takes tensors of all devices of that type."""
    x = Mock(torch.Tensor, device=torch.device(tensor), layout=torch.strided)
    comm: Any = SimpleNamespace(device=torch.device(wanted), name="sp")
    kinds = tensor.partition(":")[0], wanted.partition(":")[0]
    refused = pytest.raises(sp.DeviceError, match=f"tensor is on {tensor}, sp is on {wanted}")
    fits = kinds[0] == kinds[1] and (":" not in wanted or tensor == wanted)
    with nullcontext() if fits else refused:
        check_tensor(x, comm)


@spmd(1, 2)
def test_a_dtensor_is_refused_by_name(comm: Any) -> None:
    kind = type("DTensor", (torch.Tensor,), {})
    gather = partial(sp.all_gather, torch.ones(2).as_subclass(kind))
    attend = partial(attention, k=lambda k: k.as_subclass(kind))
    with sp.Mesh(comm, sp=comm.size) as mesh:
        for call in (lambda c: gather(comm=c), attend):
            expect(mesh["sp"], sp.DtypeError, "to_local", call)


def test_an_error_shows_an_argument_of_80_letters_and_cuts_a_longer_one() -> None:
    for letters, whole in ((78, True), (79, False)):  # and two quotes
        with pytest.raises(TypeError) as caught:
            check(dim="x" * letters)
        assert (f"dim={'x' * letters!r} was given" in str(caught.value)) == whole


@spmd()
def test_a_freed_communicator(comm: Any) -> None:
    mesh = sp.Mesh(comm, sp=comm.size)
    group = mesh["sp"]
    pending = sp.all_reduce_start(torch.ones(3), comm=group)
    mesh.free()
    mesh.free()
    assert pending.wait().tolist() == [float(comm.size)] * 3
    for call in (
        lambda: sp.all_gather(torch.ones(2), comm=group),
        lambda: attention(group),
        lambda: mesh["sp"],
    ):
        with pytest.raises(sp.RankError, match="freed"):
            call()
    with sp.Mesh(comm, sp=comm.size) as other:
        assert sp.all_reduce(torch.ones(1), comm=other["sp"]).item() == comm.size
