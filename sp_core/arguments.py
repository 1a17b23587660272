"""Check the types of arguments, with errors that say what to pass instead.

`check` knows the type that belongs to each argument name; `check_type`, `check_communicator` and
`check_tensor` check one value. They do not communicate. Collectives and schemes call them inside
`Communicator.agree_on`, so that an error on one rank is raised on all ranks.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sp_core.errors import DeviceError, DtypeError, ShapeError


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_real(value: Any) -> bool:
    """Return whether `value` is a real number that `float` can convert."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _is_number(value: Any) -> bool:
    """Return whether `value` is a real number that is finite in float32."""
    return _is_real(value) and -_MAX <= float(value) <= _MAX  # a float16 cannot hold _MAX


def _are_whole(value: Any) -> bool:
    return isinstance(value, (list, tuple, range)) and all(map(_is_whole, value))


def _are_lists(value: Any) -> bool:
    return _is_sequence(value) and all(
        _is_sequence(tokens) and all(map(_is_whole, tokens)) for tokens in value
    )


def _each(fits: Callable[[Any], bool], refused: type = str) -> Callable[[Any], bool]:
    return lambda x: _are_positions(x) and not isinstance(x, refused) and all(map(fits, x))


def _are_positions(value: Any) -> bool:
    has_dims = getattr(value, "ndim", None) != 0  # a list has none to ask for
    return isinstance(value, Collection) and not isinstance(value, str) and has_dims


def _has_step(value: Any) -> bool:
    others = type, torch.optim.LBFGS, torch.optim.lr_scheduler.LRScheduler
    return callable(getattr(value, "step", None)) and not isinstance(value, others)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


_LEAST, _MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (
            *("dim", "split_dim", "concat_dim", "root", "offset", "rank", "seed", "seq_len"),
            *("size", "start", "max_tokens", "pass_tokens", "step", "hidden", "num_heads"),
        ),
        (_is_whole, "a whole number"),
    ),
    **dict.fromkeys(
        ("tokens", "prompts", "sequences"),
        (_are_lists, "a list with a list of tokens, whole numbers, for each sequence"),
    ),
    **dict.fromkeys(
        ("sizes", "split_sizes", "concat_sizes"),
        (
            lambda x: x is None or _are_whole(x),
            "a list or tuple of whole numbers, one per rank, or None",
        ),
    ),
    **dict.fromkeys(
        ("deterministic", "return_lse", "causal", "tp_sp", "own", "recompute", "offload"),
        (lambda x: isinstance(x, bool), "True or False"),
    ),
    **dict.fromkeys(("algorithm", "op"), (lambda x: isinstance(x, str), "a name")),
    **dict.fromkeys(
        ("q_positions", "kv_positions"),
        (
            lambda x: x is None or _are_positions(x),
            "integers: a range, a list, a tensor (S,), or None for 0, 1, 2, ...",
        ),
    ),
    "place": (_are_positions, "integers: a range, a list or a tensor (S,)"),
    "stop": (_each(_is_whole), "a list, tuple or set of tokens, whole numbers"),
    "stop_strings": (
        lambda x: _is_sequence(x) and all(isinstance(text, str) and text for text in x),
        "a list or tuple of texts, none of them empty",
    ),
    **dict.fromkeys(
        ("shape", "sharded", "waiting"), (_are_whole, "a list or tuple of whole numbers")
    ),
    "room": (
        lambda x: _are_whole(x) and min(x, default=0) >= 0,
        "a list or tuple with a number of tokens, at least 0, for each sequence",
    ),
    **dict.fromkeys(("temperature", "p", "dropout", "base"), (_is_real, "a number")),
    "top_p": (lambda x: x is None or _is_real(x), "a number, or None"),
    "cost": (lambda x: _is_real(x) and 0 <= x < math.inf, "a finite number >= 0"),
    "unit": (lambda x: _is_real(x) and 0 < x < math.inf, "a finite number above 0"),
    "layers": (
        lambda x: _is_sequence(x) and all(map(_is_real, x)),
        "a list or tuple with the cost, a number, of each layer",
    ),
    "lengths": (_each(_is_whole, set), "a list or tuple of whole numbers: each sequence's tokens"),
    "packed": (_are_lists, "a list with the numbers of each rank's sequences, whole numbers"),
    "batches": (_is_sequence, "a list of micro-batches"),
    **dict.fromkeys(
        ("tensors", "shards"),
        (lambda x: isinstance(x, (list, tuple)), "a list or tuple of tensors"),
    ),
    "positions": (
        lambda x: _is_sequence(x) and all(isinstance(one, Iterable) for one in x),
        "a list with the positions, whole numbers, of each rank",
    ),
    "groups": (_are_lists, "a list with the ranks, whole numbers, of each group"),
    **dict.fromkeys(
        (
            *("count", "max_file_bytes", "chunk", "window", "micro_batches", "padded_to"),
            *("top_k", "num_kv_heads", "head_dim", "ffn_hidden"),
        ),
        (lambda x: x is None or _is_whole(x), "a whole number, or None"),
    ),
    "folder": (
        lambda x: isinstance(x, (str, Path)) and not re.search("[\0\ud800-\udfff]", str(x)),
        "a name or a Path in UTF-8, without the character \\0",
    ),
    "tokenizer": (lambda x: x is None or hasattr(x, "to_str"), "a Tokenizer, or None"),
    "comm": (
        lambda x: hasattr(x, "Split") and bool(x) and getattr(x, "is_inter", None) is not True,
        "an intracommunicator of mpi4py that is neither null nor freed, such as MPI.COMM_WORLD; "
        "or, after init_process_group(), a ProcessGroup, a DeviceMesh, or None for all ranks. Call "
        "Mesh on the mesh's own ranks only",
    ),
    "parameters": (lambda x: isinstance(x, Iterable), "the parameters, such as model.parameters()"),
    "scheduler": (
        lambda x: x is None or isinstance(x, torch.optim.lr_scheduler.LRScheduler),
        "a scheduler of torch.optim.lr_scheduler, or None",
    ),
    "generator": (
        lambda x: x is None or isinstance(x, torch.Generator),
        "a torch.Generator, or None",
    ),
    "optimizer": (
        _has_step,
        "an optimizer of model.parameters() whose step() needs no closure, such as AdamW. Call a "
        "scheduler's step() yourself, after train_step",
    ),
    "layout": (callable, "a function that makes a Sharding, such as Sharding.zigzag"),
    "ordering": (callable, "a function of sp_core.scheduling, such as one_forward_one_backward"),
    "on_token": (
        lambda x: x is None or callable(x),
        "a function of a prompt's number and a token, or None",
    ),
    "softmax_scale": (
        lambda x: x is None or (_is_number(x) and not 0 < abs(float(x)) < _LEAST),
        "0, a number from 1.2e-38 to 3.4e38 in magnitude, or None for 1/sqrt(head_dim)",
    ),
    "softcap": (
        lambda x: x is None or (_is_number(x) and float(x) >= _LEAST),
        "a number from 1.2e-38 to 3.4e38, the normal ones of float32, or None for no bound",
    ),
    "sinks": (
        lambda x: x is None or isinstance(x, Tensor),
        "a tensor with one logit per query head, or None",
    ),
    "alibi": (
        lambda x: x is None or (_is_sequence(x) and all(map(_is_number, x))),
        "a finite slope, at most 3.4e38 in magnitude, for each query head, as a list, tuple or "
        "tensor (H,), or None",
    ),
    "inner": (lambda x: x is None or callable(x), "a function that computes attention"),
    "attention": (callable, "a scheme, a function such as ring_attention"),
    "rope": (
        lambda x: x is None or hasattr(x, "frequencies"),
        "a Rope, such as Rope(head_dim), or None",
    ),
    "scaling": (
        lambda x: x is None or isinstance(x, Mapping),
        "a dict with rope_type and its entries, or None",
    ),
}
"""Name of an argument -> (test that its value must pass, text of the error for what to pass)."""


def check(kind: str | None = None, /, **given: Any) -> None:
    """Check that each argument is of the type that belongs to its name, or to the name `kind`.

    Args:
        kind: a name in `_KINDS`, the table above, if the arguments have other names.
        given: the arguments by name. Without `kind`, each name must be in `_KINDS`.

    Raises:
        TypeError: a value is of another type; the text says what was given and what is needed.
    """
    for name, value in given.items():
        fits, needed = _KINDS[kind or name]
        if not fits(value):
            raise TypeError(f"{name}={_shown(value)} was given; pass {needed}.")


def plain(value: Any) -> Any:
    """Return NumPy's whole numbers as int, a list of them as a tuple of int, all else as it is."""
    if _is_whole(value):
        return int(value)
    return tuple(map(int, value)) if _are_whole(value) else value


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
