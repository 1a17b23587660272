"""Check arguments, with errors that say what to pass instead.

`check` knows the type, and the range, of each argument name; `check_type`, `check_communicator` and
`check_tensor` check one value. They do not communicate. Collectives and schemes call them inside
`Communicator.agree_on`, so that an error on one rank is raised on all ranks.
"""

from numbers import Rational, Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sp_core.errors import DeviceError, DtypeError, ShapeError
from sp_core.kinds import RULES, are_whole, is_whole


def check(kind: str | None = None, /, **given: Any) -> None:
    """Check that each argument follows the rules that belong to its name, or to the name `kind`.

    Args:
        kind: a name in `RULES` of `sp_core.kinds`, if the arguments have other names.
        given: the arguments by name. Without `kind`, each name must be in `RULES`.

    Raises:
        TypeError: a value is of another type; the text says what was given and what is needed.
        ValueError: a value is out of range. For some names it is a ShapeError or CheckpointError.
    """
    for name, value in given.items():
        for fits, needed, error in RULES[kind or name]:
            if not fits(value):
                raise error(f"{name}={_shown(value)} was given; pass {needed}.")


def plain(value: Any) -> Any:
    """Return NumPy's numbers as int or float, a list of whole numbers as a tuple, else `value`.

    Sums and comparisons in NumPy's short dtypes would overflow or round.
    """
    if is_whole(value):
        return int(value)
    if isinstance(value, Real) and not isinstance(value, Rational):
        return float(value)
    return tuple(map(int, value)) if are_whole(value) else value


def check_positive(**given: int | None) -> None:
    """Check whole numbers from 1 to 2**62, or None where `check` takes None for the name.

    Raises:
        TypeError: as in `check`.
        ValueError: a number below 1, or too large for computations in int64.
    """
    check(**given)
    for name, value in given.items():
        if value is not None and not 1 <= value <= 1 << 62:
            raise ValueError(f"{name}={value} was given; pass a whole number from 1 to 2**62.")


def check_type(name: str, value: Any, kind: type, remedy: str) -> None:
    """Check that a value is an instance of `kind`.

    Args:
        name: what the error calls the value.
        value, kind: the value, and the class that it must be an instance of.
        remedy: a sentence for the error, which says how to get a `kind`.

    Raises:
        TypeError: the value is no `kind`; the text says what was given and how to get one.
    """
    if not isinstance(value, kind):
        needed = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
        raise TypeError(f"{name}={_shown(value)} was given; {needed} is needed. {remedy}")


def length_along(x: Tensor, dim: int) -> int:
    """Return the length of a tensor along `dim`.

    Raises:
        TypeError: `dim` is not a whole number, or x no tensor.
        ShapeError: x does not have that dimension.
    """
    check(dim=dim)
    check_type("x", x, Tensor, "Pass torch.as_tensor(...) of it.")
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(
            f"dim {dim} was given for a tensor with {x.dim()} dims, shape {tuple(x.shape)}. "
            "Pass a dim that it has."
        )
    return x.shape[dim]


def check_communicator(comm: Any, name: str = "comm") -> None:
    """Check that a value is a `Communicator`. Without one, other ranks do not learn of the error.

    Raises:
        TypeError: on this rank only. The text says what was given and how to get a communicator.
    """
    if not hasattr(comm, "agree_on"):
        raise TypeError(
            f"{name}={_shown(comm)} was given; a Communicator is needed. Pass one of a mesh, such "
            f"as mesh['ring']."
        )


def _shown(value: Any) -> str:
    """Return the text of a value for an error: a tensor's shape, else `repr`, shortened if long."""
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{type(value).__name__} {text[:60]}..."


def check_tensor(
    x: Tensor,
    comm: Any,
    name: str = "the tensor",
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> None:
    """Check that x is a dense tensor on the device of a communicator, and of an allowed dtype.

    Args:
        x: this rank's tensor.
        comm: the `Communicator` that will send it.
        name: what errors call the tensor.
        dtypes: the dtypes that are allowed; None allows all.

    Raises:
        DtypeError: x is not a tensor, is a DTensor, has a dtype that is not allowed, or is refused
            by `check_memory`.
        DeviceError: x is on a different device than `comm`.
        ShapeError: x is not strided, such as a sparse tensor.
    """
    check_dense(x, name)
    want = comm.device
    if x.device.type != want.type or (want.index is not None and x.device.index != want.index):
        raise DeviceError(
            f"{name} is on {x.device}, {comm.name} is on {want}. "
            f"Make it with device=mesh.device, or the mesh with device={str(x.device)!r}."
        )
    check_memory(x, name)
    if dtypes is not None and x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DtypeError(
            f"{name} has dtype {x.dtype}; needed is one of {names}. Convert the tensor."
        )


def check_gradients(comm: Any, *grads: Tensor | None) -> None:
    """Check as `check_tensor` the gradients that a backward has got; None is a gradient of 0."""
    for grad in grads:
        if grad is not None:
            check_tensor(grad, comm, "an incoming gradient")


def check_kept(*tensors: Tensor | None) -> None:
    """Raise `ValueError` if one tensor requires a gradient and another is an inference tensor."""
    given = [x for x in tensors if x is not None and torch.is_grad_enabled()]
    if any(x.requires_grad for x in given) and any(x.is_inference() for x in given):
        raise ValueError(
            "a tensor made in torch.inference_mode() was given beside one that requires a gradient."
            " Autograd cannot save it for backward. Pass x.clone(), called outside of that mode."
        )


def check_memory(x: Tensor, name: str, *, is_sent: bool = True) -> None:
    """Check that x has memory that MPI can be given, and no tangent of forward-mode AD.

    Args:
        x: a strided tensor.
        name: what the error calls the tensor.
        is_sent: whether x will be sent; if not, x may have no memory, such as a FakeTensor.

    Raises:
        DtypeError: x is a dual tensor, is inside a transform such as torch.func.vmap, is a
            ZeroTensor, or its memory was freed.
    """
    plain = Tensor.__torch_dispatch__
    is_plain = getattr(type(x), "__torch_dispatch__", plain) is plain
    if not (_has_values(x) if is_plain else not is_sent):
        raise DtypeError(
            f"{name} is a tensor ({type(x).__name__}) without memory that could be sent, or with a "
            "tangent. Such tensors come from torch.func, forward-mode AD, FakeTensorMode and "
            "is_grads_batched=True. Pass a plain tensor, and compute one gradient at a time."
        )


def _has_values(x: Tensor) -> bool:
    """Return whether the elements of x lie in its memory, and are all that x has."""
    inside = torch._C._are_functorch_transforms_active()  # there torch refuses our functions
    try:
        is_there = not inside and (x.untyped_storage().data_ptr() != 0 or not x.numel())
    except RuntimeError:  # a ZeroTensor
        return False
    # `unpack_dual` finds no tangent outside a level; not to call it is faster
    return is_there and (forward_ad._current_level < 0 or forward_ad.unpack_dual(x).tangent is None)


def check_dense(x: Tensor, name: str) -> None:
    """Check that x is a plain dense tensor; `name` names it in the error.

    Raises:
        DtypeError: x is no tensor, or a DTensor.
        ShapeError: x is not strided, such as a sparse or nested tensor.
    """
    if not isinstance(x, Tensor):
        raise DtypeError(
            f"{name} must be a tensor, {type(x).__name__} was given. "
            "Pass torch.as_tensor(...) of it."
        )
    if type(x).__name__ == "DTensor":
        raise DtypeError(
            f"{name} is a DTensor, whose own layout may differ from the sharding. "
            "Pass this rank's own tokens as a plain tensor, such as x.to_local()."
        )
    if x.is_nested or x.layout is not torch.strided:
        layout, dense = (
            ("nested", "to_padded_tensor(0.0)") if x.is_nested else (x.layout, "to_dense()")
        )
        raise ShapeError(f"{name} has layout {layout}; a dense one is needed. Pass x.{dense}.")
