"""LLaMA over a mesh: weights split over tensor ranks, layers over stages, sequences over sequence ranks, batches over replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from sp_core import arguments
from sp_core.errors import ShapeError
from sp_core.gradients import Placement, placement_of
from sp_core.llama.config import LlamaConfig
from sp_core.llama.grid import Grid
from sp_core.llama.layers import Embedding, Layer, Lengths, Norm, Weight, kv_slots, project
from sp_core.loss import check_shard
from sp_core.mask import Mask, Positions
from sp_core.mask.definition import document_of
from sp_core.scheduling import split_stages
from sp_core.sharding import Sharding, split_sizes

LayerAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of the layer of that number, with rotated q and k."""
CAUSAL = Mask(causal=True)


class Llama(nn.Module):
    """A LLaMA whose weights have not been set yet; `load` makes one from a model folder, and `fill` sets them from anywhere.

    Each parameter carries its placement (see `sp_core.gradients`). It has the name of Hugging Face's, without "model.".

    Args:
        config: the architecture.
        grid: the ranks, as from `Grid.of`.
        dtype: of the weights, and in which everything is computed.
        tp_sp: between the splits of the weights each tensor rank has a part of the tokens, which takes 1/T of the memory; but not
            where a decoder takes single tokens. The gradients of norms are then `partial`.

    Raises:
        ShapeError: more tensor ranks than heads, feed-forward features or tokens in the vocabulary, or more stages than layers. On
            every rank.
    """

    def __init__(self, config: LlamaConfig, grid: Grid, *, dtype: torch.dtype = torch.float32, tp_sp: bool = False) -> None:
        super().__init__()
        check_ranks(config, grid.tensor.size)
        self.config = config
        self.grid = grid
        self.dtype = dtype
        self.tp_sp = tp_sp
        comm = grid.tensor
        self.own = stage_layers(config, grid.stages.size)[grid.stages.rank]
        self.is_first, self.is_last = grid.stages.rank == 0, grid.stages.rank == grid.stages.size - 1
        if self.is_first or (self.is_last and config.tie_word_embeddings):
            self.embed_tokens = Embedding(config, comm, dtype, copy=not self.is_first)
        self.layers = nn.ModuleList(
            [Layer(config, comm, dtype, tp_sp) if number in self.own else nn.Module() for number in range(config.num_hidden_layers)]
        )
        if self.is_last:
            self.norm = Norm(config, comm, dtype, tp_sp)
        if self.is_last and not config.tie_word_embeddings:
            self.lm_head = Weight(Placement.split((config.vocab_size, config.hidden_size), 0, comm.size), comm, dtype)
        self.rope = config.rope()
        self.slots = kv_slots(config, comm)

    @torch.no_grad()
    def fill(self, read: Callable[[str, Placement], Tensor]) -> None:
        """Set every weight to what `read` returns for its name in a checkpoint and its placement: this rank's part."""
        for name, parameter in self.named_parameters():
            parameter.copy_(read(checkpoint_name(name), placement_of(parameter)))

    def forward(self, tokens: Tensor, *, sharding: Sharding, mask: Mask = CAUSAL) -> Tensor:
        """The logits of the token after each of this rank's tokens, for this rank's part of the vocabulary.

        Args:
            tokens: int64 (B, S/P), the same on all tensor ranks; replicas may have other shapes.
            sharding: who owns which tokens of the sequence, over the sequence ranks.
            mask: who sees whom; positions count from the beginning of a token's document.

        Returns:
            (B, S/P, V/T).

        Communication:
            Per layer that of the scheme over the sequence ranks, and two all-reduces of (B, S/P, E) over the tensor ranks; one more
            for the embedding. Backward as many again. With `tp_sp` each of these is a reduce-scatter, and an all-gather comes
            before each split; backward the same, and each all-gather once more.

        Raises:
            ShapeError, DtypeError, ValueError: tokens or a mask that do not fit, tokens that are not in the vocabulary, or layers
                that are split over stages, for which there are `Decoder` and `pipeline.loss_and_gradients`. On every rank of the
                mesh.
        """
        self.grid.everyone.agree_on(lambda: f"Llama({self.dtype}, tp_sp={self.tp_sp})", lambda: self._check(tokens, sharding, mask))
        attend = partial(self.attend, sharding=sharding, mask=mask)
        positions = document_positions(sharding.positions(self.grid.sequence.rank), mask)
        lengths = self.lengths(tokens)
        return self.logits(self.hidden(tokens, positions, lambda layer, q, k, v: attend(q, k, v), lengths), lengths)

    def lengths(self, tokens: Tensor) -> Lengths:
        """How many of the tokens (B, S) each tensor rank has between the splits; None if they have them all."""
        return split_sizes(tokens.shape[1], self.grid.tensor.size) if self.tp_sp else None

    def hidden(self, tokens: Tensor, positions: Positions, attend: LayerAttend, lengths: Lengths = None) -> Tensor:
        """(B, S) tokens at these positions of their own sequences to (B, S, E), with `lengths` (B, S/T, E), after the last norm.

        A later stage takes what the one before it gives, and none but the last applies the norm. `attend` gets the number of a
        layer among those of this stage.
        """
        x: Tensor = self.embed_tokens(tokens, lengths) if self.is_first else tokens
        for place, number in enumerate(self.own):
            x = self.layers[number](x, self.rope, positions, partial(attend, place), lengths)
        return self.norm(x) if self.is_last else x

    def logits(self, hidden: Tensor, lengths: Lengths = None) -> Tensor:
        """(B, S, E), or with `lengths` (B, S/T, E), to (B, S, V/T)."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return project(hidden, head, comm=self.grid.tensor, lengths=lengths)[0]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, sharding: Sharding, kv_sharding: Sharding | None = None, mask: Mask
    ) -> Tensor:
        """Attention of this rank's heads, by the scheme of the grid."""
        out = self.grid.attention(q, self.spread(k), self.spread(v), sharding=sharding, kv_sharding=kv_sharding, mask=mask)
        assert isinstance(out, Tensor)
        return out

    def spread(self, x: Tensor) -> Tensor:
        """Key/value heads (B, S, K/T, D) in the slots in which this rank's query heads read them."""
        return x if self.slots is None else x[:, :, self.slots]

    def _check(self, tokens: Tensor, sharding: Sharding, mask: Mask) -> int:
        if self.grid.stages.size > 1:
            raise ShapeError(
                f"the layers are split over {self.grid.stages.size} stages, and one call of the model would use one at a time. Use "
                "Decoder, or pipeline.loss_and_gradients to train; or leave pp out."
            )
        check_shard(tokens, self.grid.sequence, sharding)
        arguments.check_type("mask", mask, Mask, "Pass Mask(causal=True), which is the default.")
        mask.check_lengths(sharding.end)
        check_tokens(tokens, self.config)
        return 0


def check_model(model: object) -> None:
    """Refuse what is no LLaMA. No rank can be asked then, so this is a local error."""
    arguments.check_type("model", model, Llama, "Make one with load or create.")


def check_tokens(tokens: Tensor, config: LlamaConfig, what: str = "token") -> None:
    """Refuse tokens or labels outside the vocabulary, for which a split embedding would give zeros.

    Raises:
        ValueError: there is one.
    """
    wrong = tokens[(tokens < 0) | (tokens >= config.vocab_size)]
    if wrong.numel():
        raise ValueError(f"{what} {int(wrong[0])} was given; the vocabulary has 0..{config.vocab_size - 1}.")


def checkpoint_name(name: str) -> str:
    """The name of a parameter in a Hugging Face checkpoint."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def parameter_names(model: Llama) -> set[str]:
    """The names of all parameters of all stages in a checkpoint."""
    layer = [name for name, _ in model.layers[model.own[0]].named_parameters()]
    names = [f"layers.{number}.{name}" for number in range(model.config.num_hidden_layers) for name in layer]
    head = [] if model.config.tie_word_embeddings else ["lm_head.weight"]
    return {checkpoint_name(name) for name in ("embed_tokens.weight", *names, "norm.weight", *head)}


def stage_layers(config: LlamaConfig, stages: int) -> tuple[range, ...]:
    """The layers of each stage, such that the slowest one, with the head on the last, is as fast as can be.

    Raises:
        ShapeError: more stages than layers.
    """
    layer = config.hidden_size * (
        2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim + 3 * config.intermediate_size
    )
    return split_stages([layer] * config.num_hidden_layers, stages, last=config.hidden_size * config.vocab_size)


def document_positions(positions: Tensor, mask: Mask) -> Tensor:
    """Positions counted from the beginning of each token's document: what rotary angles come from."""
    if mask.documents is None:
        return positions
    return positions - torch.tensor(mask.documents)[document_of(positions, mask.documents)]


def check_ranks(config: LlamaConfig, size: int) -> None:
    """Refuse tensor ranks that would have nothing to do.

    Raises:
        ShapeError: there are more of them than heads, feed-forward features or tokens in the vocabulary.
    """
    for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) < size:
            raise ShapeError(
                f"{size} tensor ranks are too many for {name}={getattr(config, name)}. Use tp <= {getattr(config, name)}, and more "
                "ranks along another axis."
            )
