"""Make collectives differentiable: autograd functions run the transposed collective in backward.

The loss convention of this package: every rank has a loss of its own, and gradients are those of
the SUM of the losses over the ranks. A collective is then a linear map from the tensors of all
ranks to the results of all ranks. The backward is the transpose of that map:

    all_gather  <-> reduce_scatter       all_to_all <-> all_to_all, split and concat swapped
    all_reduce  <-> all_reduce           shift      <-> shift the other way
    broadcast   <-> reduce

Tensor parallelism also has values that all ranks hold alike and that count once in the loss. Three
functions mark where such a value begins or ends. A plain all_reduce, which is its own transpose,
would multiply gradients by the number of ranks there:

                       forward     backward
    copy_to_group      identity    all_reduce   one value becomes a copy for every rank
    reduce_from_group  all_reduce  identity     partial sums become one value
    gather_replicated  all_gather  own slice    shards become one value

torch runs the backward of the functions of a graph in the reverse order of their creation. The
autograd function of a started collective is created when the collective starts, in the same order
on every rank. So the collectives of a backward run in the same order on all ranks, in whatever
order each rank waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from sp_core.arguments import check_communicator, check_gradients
from sp_core.collectives.build import build, check_summable
from sp_core.collectives.maps import AllGather, AllReduce, Map
from sp_core.communicator import Communicator
from sp_core.compiling import EagerFunction, eager


@dataclass(frozen=True)
class _Local:
    """A function that sends nothing, which `_Apply` runs where it would run a collective.

    `run` is the backward of `reduce_from_group` and `gather_replicated`, and the backward of the
    backward of `copy_to_group`.

    Args:
        name: names the function in the errors of `agree`.
        run: the function that is held.
        agree: the function that `numbered` returned, in a call that all ranks make. `_Apply` calls
            it before a backward that communicates.
    """

    name: str
    run: Callable[[Tensor], Tensor]
    agree: Callable[..., object]


class _Apply(EagerFunction):
    """Run or begin a collective (a map) in forward, and run its transpose in backward.

    `forward` takes x, the map, its transpose (None for that of `Map.transpose`), and the function
    that runs or begins the map. If the transpose communicates, `backward` first checks that all
    ranks run the same one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mapping: Map | _Local,
        transpose: Map | _Local | None,
        run: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.mapping, ctx.transpose = mapping, transpose
        # a rank may run a `_Local` alone, so it draws no number here
        ctx.agree = mapping.agree if isinstance(mapping, _Local) else mapping.comm.numbered()
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        transpose = ctx.transpose or ctx.mapping.transpose
        if isinstance(transpose, Map):
            ctx.agree(
                f"the backward of {ctx.mapping.name}",
                partial(check_gradients, transpose.comm, *grads),
            )
        return _apply(grads[0], transpose, ctx.mapping, transpose.run), None, None, None


_apply: Callable[
    [Tensor, Map | _Local, Map | _Local | None, Callable[[Tensor], Tensor]], Tensor
] = _Apply.apply


def apply(x: Tensor, mapping: Map) -> Tensor:
    """Run a collective on x, and return the result as a differentiable function of x."""
    return _apply(x, mapping, None, mapping.run)


class Pending:
    """Hold a collective that has begun. The `_start` functions return it.

    Do other work, call `comm.poll()` now and then so that the collective makes progress, and call
    `wait()` for the result. The input must not be changed until `wait` has returned.
    """

    def __init__(self, x: Tensor, mapping: Map) -> None:
        self._mapping = mapping
        self._wait: Callable[[], Tensor] | None = None
        # `wait` returns this tensor; it has no values before
        self._result = _apply(x, mapping, None, self._start)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the Pending of {self._mapping.name} cannot be copied or pickled. Begin the "
            "collective again on every rank."
        )

    def _start(self, x: Tensor) -> Tensor:
        """Begin the collective on x, and return the result tensor, which has no values yet."""
        out, self._wait = self._mapping.start(x.detach())
        # the same memory in another tensor: writing into a view would change the graph of this one
        return out.detach()

    @eager
    def wait(self) -> Tensor:
        """Wait until the collective is complete on this rank, and return the result.

        The result is a differentiable function of the input. A second call returns the same tensor
        at once. After `Mesh.free`, which has waited for the collective, this returns the result.

        Raises:
            RankError: the collective is incomplete, and this rank has left the mesh because of an
                error, or another rank has (`PeerFailed`).
        """
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._result


def call(which: str, x: Tensor, comm: Communicator, /, **given: Any) -> Tensor:
    """Run a collective and return its result.

    Args:
        which: name of the collective.
        x: this rank's tensor.
        comm: the communicator whose ranks all make this call.
        given: the other arguments of the public function.
    """
    return apply(x, build(which, which, x, comm, **given))


def begin(which: str, x: Tensor, comm: Communicator, /, **given: Any) -> Pending:
    """Begin the collective named `which` with the arguments `given`, and return its `Pending`."""
    return Pending(x, build(f"{which}_start", which, x, comm, **given))


def _passed_on(comm: Communicator) -> _Local:
    """Return the backward of `reduce_from_group`: a copy of the gradient, without communication.

    The backward of the backward of `copy_to_group` is the same.

    Torch makes the gradient that a leaf gets its `.grad`, and adds to it in place. Leaves whose
    sums were added up would share the memory of one gradient that was not copied.
    """
    return _Local("copy_to_group", Tensor.clone, comm.numbered())


def copy_to_group(x: Tensor, *, comm: Communicator) -> Tensor:
    """Turn one value that all ranks hold alike into a copy for each rank's own computation.

    Args:
        x: the same values on every rank.
        comm: the communicator whose ranks all make this call.

    Returns:
        x; its gradient is the sum of the gradients of all ranks.

    Communication:
        Forward only the check of the arguments; one all-reduce of the gradient backward.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in `all_gather`, on
            every rank.

    Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3, the operator f.
    """
    reduce = build("copy_to_group", "all_reduce", x, comm)
    return _apply(x, _passed_on(comm), reduce, lambda x: x.view_as(x))


def reduce_from_group(x: Tensor, *, comm: Communicator, algorithm: str = "auto") -> Tensor:
    """Sum partial results of the ranks into one value that all hold alike.

    Use it where all ranks compute one loss from the sum. After `all_reduce`, each rank's loss would
    count, and the gradient would be P times as large.

    Args:
        x: this rank's part of the sum, the same shape on every rank.
        comm, algorithm: as in `all_gather`.

    Returns:
        The sum; the gradient passes through unchanged.

    Communication:
        One all-reduce forward; none backward.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in
            `all_gather`, on every rank.
        TypeError, ValueError: as in `all_gather`.

    Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3, the operator g.
    """
    mapping = build("reduce_from_group", "all_reduce", x, comm, algorithm=algorithm)
    return _apply(x, mapping, _passed_on(comm), mapping.run)


def gather_replicated(
    x: Tensor,
    *,
    comm: Communicator,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """Put shards together into one value that all ranks hold alike.

    Use it where all ranks compute one loss from the result. If their gradients differ, the gradient
    of the shards is wrong; this is not checked.

    Args:
        x, comm, dim, sizes, algorithm: as in `all_gather`.

    Returns:
        The result of `all_gather`. In backward each rank takes its own slice of the gradient, and
        nothing is summed.

    Communication:
        One all-gather forward; none backward.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in `all_gather`, on
            every rank.
        TypeError, ValueError: as in `all_gather`.
    """
    gather = build(
        "gather_replicated", "all_gather", x, comm, dim=dim, sizes=sizes, algorithm=algorithm
    )
    assert isinstance(gather, AllGather)
    place, mine = sum(gather.sizes[: comm.rank]), gather.sizes[comm.rank]
    own = _Local(
        "slice", lambda whole: whole.narrow(gather.dim, place, mine).clone(), comm.numbered()
    )
    return _apply(x, gather, own, gather.run)


class _CopyAllToGroup(EagerFunction):
    """Apply `copy_to_group` to many tensors. Backward makes one all-reduce per dtype.

    `forward` takes the communicator and the tensors.
    """

    @staticmethod
    def forward(ctx: Any, comm: Communicator, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.agree = comm, comm.numbered()
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.agree("the backward of copy_all_to_group", partial(check_gradients, ctx.comm, *grads))
        summed: list[Tensor | None] = [None] * len(grads)
        for dtype in sorted({grad.dtype for grad in grads}, key=str):
            places = [place for place, grad in enumerate(grads) if grad.dtype == dtype]
            joined = torch.cat([grads[place].reshape(-1) for place in places])
            # as in copy_to_group: the sum is one value that all ranks hold alike
            reduce = AllReduce(ctx.comm)
            flat = _apply(joined, reduce, _passed_on(ctx.comm), reduce.run)
            for place, part in zip(
                places, flat.split([grads[p].numel() for p in places]), strict=True
            ):
                summed[place] = part.view(grads[place].shape)
        return None, *summed


def copy_all_to_group(tensors: Sequence[Tensor], *, comm: Communicator) -> tuple[Tensor, ...]:
    """Apply `copy_to_group` to many tensors at once, such as the parameters of a layer.

    Args:
        tensors: the same shapes, dtypes and `requires_grad` on every rank.
        comm: the communicator whose ranks all make this call.

    Returns:
        The tensors, in the given order; the gradient of each is the sum of the gradients of all
        ranks. Differentiable any number of times.

    Communication:
        One agreement (32-byte all-reduce) of the arguments forward. Backward one all-reduce per
        dtype, once the gradients of all tensors have been computed.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in `all_gather`, on
            every rank.
        TypeError: `tensors` is no list or tuple, on every rank.
    """
    check_communicator(comm)
    comm.agree_on(lambda: describe_all(tensors, comm), lambda: check_summable(tensors, comm))
    return copy_all(tensors, comm)


def describe_all(tensors: Sequence[Tensor], comm: Communicator) -> str:
    """Describe a call of `copy_all_to_group` by shapes, dtypes and the name of `comm`.

    The text must be the same on all ranks.
    """
    shown = ", ".join(f"{tuple(x.shape)} {x.dtype} {x.requires_grad}" for x in tensors)
    return f"copy_all_to_group({shown}, grad={torch.is_grad_enabled()}) on {comm.name}"


def copy_all(tensors: Sequence[Tensor], comm: Communicator) -> tuple[Tensor, ...]:
    """Return the tensors; backward sums their gradients over the ranks, as `copy_all_to_group`.

    There is no check that the ranks agree on the tensors. Tensors that require no gradient are
    returned as they are. The tensors stay in order.
    """
    apply_all: Any = _CopyAllToGroup.apply
    copies = iter(apply_all(comm, *(x for x in tensors if x.requires_grad)))
    return tuple(next(copies) if x.requires_grad else x for x in tensors)
