"""Define the type and the range of each argument, by the argument's name. `check` uses them."""

import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set as AbstractSet
from numbers import Integral, Rational, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sp_core.errors import CheckpointError, ShapeError


def is_whole(value: Any) -> bool:
    """Return whether `value` is a whole number, of Python or NumPy, and no bool."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_real(value: Any) -> bool:
    """Return whether `value` is a real number, and no integer or fraction beyond all floats."""
    is_exact = isinstance(value, Rational)  # infinity and NaN are floats, and real
    fits = not is_exact or -sys.float_info.max <= value <= sys.float_info.max
    return isinstance(value, Real) and not isinstance(value, bool) and fits


def _is_number(value: Any) -> bool:
    """Return whether `value` is a real number that is finite in float32."""
    return _is_real(value) and -_MAX <= float(value) <= _MAX  # a float16 cannot hold _MAX


def are_whole(value: Any) -> bool:
    """Return whether `value` is a list, tuple or range of whole numbers."""
    return isinstance(value, (list, tuple, range)) and all(map(is_whole, value))


def _are_lists(value: Any) -> bool:
    return _is_sequence(value) and all(
        _is_sequence(tokens) and all(map(is_whole, tokens)) for tokens in value
    )


def _each(fits: Callable[[Any], bool], *refused: type) -> Callable[[Any], bool]:
    return lambda x: _are_positions(x) and not isinstance(x, refused) and all(map(fits, x))


def _are_positions(value: Any) -> bool:
    has_dims = getattr(value, "ndim", None) != 0  # a list has none to ask for
    return isinstance(value, Collection) and not isinstance(value, str) and has_dims


def _is_communicator(value: Any) -> bool:
    """Return whether `Mesh` can split this: no communicator of an MPI session without MPI_Init."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and isinstance(value, mpi.Comm) and not mpi.Is_initialized():
        return False
    return hasattr(value, "Split") and bool(value) and getattr(value, "is_inter", None) is not True


def _has_step(value: Any) -> bool:
    others = type, torch.optim.LBFGS, torch.optim.lr_scheduler.LRScheduler
    return callable(getattr(value, "step", None)) and not isinstance(value, others)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


_LEAST, _MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (
            *("dim", "split_dim", "concat_dim", "root", "offset", "rank", "seed", "seq_len"),
            *("size", "start", "max_tokens", "pass_tokens", "step", "hidden", "num_heads"),
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        ),
        (is_whole, "a whole number"),
    ),
    **dict.fromkeys(
        ("tokens", "prompts", "sequences"),
        (_are_lists, "a list with a list of tokens, whole numbers, for each sequence"),
    ),
    **dict.fromkeys(
        ("sizes", "split_sizes", "concat_sizes"),
        (
            lambda x: x is None or are_whole(x),
            "a list or tuple of whole numbers, one per rank, or None",
        ),
    ),
    **dict.fromkeys(
        (
            *("deterministic", "return_lse", "causal", "tp_sp", "own", "recompute", "offload"),
            "tie_word_embeddings",
        ),
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
    "stop": (_each(is_whole), "a list, tuple or set of tokens, whole numbers"),
    "stop_strings": (
        lambda x: _is_sequence(x) and all(isinstance(text, str) and text for text in x),
        "a list or tuple of texts, none of them empty",
    ),
    **dict.fromkeys(
        ("shape", "sharded", "waiting"), (are_whole, "a list or tuple of whole numbers")
    ),
    "room": (
        lambda x: are_whole(x) and min(x, default=0) >= 0,
        "a list or tuple with a number of tokens, at least 0, for each sequence",
    ),
    **dict.fromkeys(("temperature", "p", "dropout", "base", "tolerance"), (_is_real, "a number")),
    "top_p": (lambda x: x is None or _is_real(x), "a number, or None"),
    **dict.fromkeys(
        ("rms_norm_eps", "rope_theta"),
        # a Fraction cannot be written as JSON
        (lambda x: isinstance(x, int | float) and _is_real(x), "an int or a float"),
    ),
    "cost": (lambda x: _is_real(x) and 0 <= x < math.inf, "a finite number >= 0"),
    "unit": (lambda x: _is_real(x) and 0 < x < math.inf, "a finite number above 0"),
    "layers": (
        lambda x: _is_sequence(x) and all(map(_is_real, x)),
        "a list or tuple with the cost, a number, of each layer",
    ),
    "lengths": (
        _each(is_whole, AbstractSet, Mapping),
        "a list or tuple of whole numbers: each sequence's tokens",
    ),
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
        (lambda x: x is None or is_whole(x), "a whole number, or None"),
    ),
    "folder": (
        lambda x: isinstance(x, (str, Path)) and not re.search("[\0\ud800-\udfff]", str(x)),
        "a name or a Path in UTF-8, without the character \\0",
    ),
    "tokenizer": (lambda x: x is None or hasattr(x, "to_str"), "a Tokenizer, or None"),
    "comm": (
        _is_communicator,
        "an intracommunicator of mpi4py that is neither null nor freed, after MPI.Init(), such as "
        "MPI.COMM_WORLD; "
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
"""Name of an argument -> (test that a value of its type passes, text for what to pass)."""
_RANGES: dict[str, tuple[Callable[[Any], bool], str, type[ValueError]]] = {
    **dict.fromkeys(
        ("temperature", "rms_norm_eps"),
        (lambda x: 0 <= x < math.inf, "a number of at least 0", ValueError),
    ),
    "top_k": (lambda x: x is None or x >= 1, "at least 1, or None for all tokens", ValueError),
    "top_p": (
        lambda x: x is None or 0 < x <= 1,
        "a number above 0 and at most 1, or None for all tokens",
        ValueError,
    ),
    **dict.fromkeys(("max_tokens", "step"), (lambda x: x >= 0, "at least 0", ValueError)),
    "pass_tokens": (lambda x: x >= 1, "at least 1", ValueError),
    "dropout": (lambda x: 0 <= x < 1, "a number in [0, 1)", ValueError),
    "window": (
        lambda x: x is None or x >= 1,
        "at least 1, because a query counts itself, or None for no window",
        ValueError,
    ),
    **dict.fromkeys(
        ("base", "rope_theta"),
        (lambda x: 0 < x < math.inf, "a positive number; 10000 is the usual one", ValueError),
    ),
    "tolerance": (lambda x: x > 0, "a number above 0", ShapeError),
    "micro_batches": (lambda x: x is None or x >= 1, "at least 1", ShapeError),
    "max_file_bytes": (
        lambda x: x is None or x >= 1,
        "at least 1, or None for one file",
        CheckpointError,
    ),
}
"""Name of an argument -> (test that a value in its range passes, text for what to pass, error)."""
RULES = {
    name: tuple(rule for rule in ((*kind, TypeError), _RANGES.get(name)) if rule)
    for name, kind in _TYPES.items()
}
"""Name of an argument -> its rules (test that a value passes, text for what to pass, error)."""
