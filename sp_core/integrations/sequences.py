"""Check whole sequences, the arguments of a forward, and read documents from them.

Tensors are also shortened to texts, which ranks compare.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.errors import ShapeError
from sp_core.llama.config import check_tokens
from sp_core.llama.grid import Grid
from sp_core.nn.loss import IGNORED, check_labels

WHOLE = ("input_ids", "attention_mask", "position_ids", "labels")
"""The arguments of a forward that are tensors (B, S) of the whole sequence."""
DTYPES = {"input_ids": (torch.int64, torch.int32), "labels": (torch.int64,)}
"""The dtypes that torch's embedding and loss take, by argument of a forward."""

REMEDY = "Leave them out; to generate, save the model and load it without `parallelize`."
TAKEN = (*WHOLE, "num_items_in_batch", "return_dict", "output_hidden_states")


def check_inputs(given: Mapping[str, Any], config: Any, grid: Grid) -> None:
    """Raise an error, on this rank, if a parallelized model cannot take these arguments.

    `given`: the arguments of a forward by name; `grid`: the ranks of the model.
    """
    comm, unset = grid.sequence, (None, False, 0)
    other = [
        name
        for name, x in given.items()
        if name not in TAKEN and not any(x is value for value in unset)
    ]
    if other:
        raise ValueError(f"{other} were given; a parallelized model takes {TAKEN}. {REMEDY}")
    counted, labels = given.get("num_items_in_batch"), given.get("labels")
    if grid.replicas.size > 1 and counted is not None and labels is None:
        raise ValueError(
            "num_items_in_batch was given without labels, as Trainer does with "
            "label_smoothing_factor or compute_loss_func. It counts the labels of one replica, so "
            "gradients would be too large. Leave these settings out, or use a mesh without 'dp'."
        )
    tokens: Any = given.get("input_ids")
    for name in WHOLE:
        x: Any = given.get(name)
        if x is None and name != "input_ids":
            continue
        arguments.check_tensor(x, comm, name, DTYPES.get(name))
        rows = (1, len(tokens)) if name == "position_ids" else (len(tokens),)
        if x.dim() != 2 or x.shape[0] not in rows or x.shape[1] != tokens.shape[1]:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, input_ids {tuple(tokens.shape)}; needed is "
                "(batch, tokens of the whole sequence), the same on every rank."
            )
    if tokens.shape[1] < comm.size or not len(tokens):
        raise ShapeError(
            f"{len(tokens)} sequences of {tokens.shape[1]} tokens were given to {comm.size} ranks; "
            "transformers needs at least one sequence, and at least one token on each rank. Use "
            "fewer ranks, or pad."
        )
    _check_values(given, config)


def _check_values(given: Mapping[str, Any], config: Any) -> None:
    """Raise ValueError for tokens, labels, documents or padding that no forward takes.

    A mask may hide only padding at the end of rows, whose labels, if any, must be IGNORED. A mask
    together with several documents in a row is refused.
    """
    labels, mask = given.get("labels"), given.get("attention_mask")
    check_tokens(given["input_ids"], config)
    if labels is not None:
        check_labels(labels, config.vocab_size)
    _, documents = positions_of(given)
    if mask is None:
        return
    seen = mask.bool()
    if documents is not None or (mask != seen).any() or (seen[:, 1:] & ~seen[:, :-1]).any():
        raise ValueError(
            "an attention_mask was given that is not 1 for tokens and 0 for padding at the end of "
            "each row, or one together with position_ids that restart. Pad on the right; leave it "
            "out for packed documents."
        )
    if labels is not None and (labels[~seen] != IGNORED).any():
        raise ValueError(f"padding has labels; set them to {IGNORED}, so that they do not count.")


def positions_of(given: Mapping[str, Any]) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return position ids (B, S), and the bounds (0, ..., S) of documents (None if only one)."""
    tokens, positions = given["input_ids"], given.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    starts = positions.diff(dim=1) != 1
    if (starts != starts[:1]).any():
        raise ValueError(
            "the rows of position_ids restart at different places; all rows of a batch need the "
            "same documents. Give each packed row in a batch of its own."
        )
    bounds = (starts[0].nonzero().flatten() + 1).tolist()
    documents = (0, *bounds, tokens.shape[1]) if bounds else None
    return positions.expand_as(tokens), documents


def byte_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of a tensor's bytes by row and by column. Rows run along the last dim.

    Unlike one sum they tell a permutation of rows or columns. Eight bytes are added as one int64
    where rows allow it, since torch converts bytes to int64 before it adds them.
    """
    rows = torch.atleast_2d(x).flatten(0, -2).clone(memory_format=torch.contiguous_format)
    in_words = rows.numel() > 0 and rows.shape[-1] * rows.itemsize % 8 == 0
    words = rows.view(torch.int64 if in_words else torch.uint8)
    return words.sum(0), words.sum(1)


def digest(*tensors: Tensor | None) -> str:
    """Return a short text: equal on ranks with equal tensors, else almost surely different."""
    found = blake2b(digest_size=8)
    for x in tensors:
        found.update(repr(x if x is None else x.shape).encode())
        if x is not None:
            found.update(x.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
