"""The LLaMA model over a mesh, and `create`, which makes one with random weights.

Weights are split over tensor ranks, layers over stages, sequences over sequence ranks, batches over
replicas; `Grid` has these groups of ranks. Shapes: B batch, S tokens, E model dim, D head dim, H
heads, K key/value heads, V vocabulary, P sequence ranks, T tensor ranks. TP-SP: between the
products with split weights each tensor rank has only some of the tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn

from sp_core import arguments
from sp_core.agreement import make_alike
from sp_core.attention import FLOATS
from sp_core.collectives.api import all_gather
from sp_core.collectives.differentiable import copy_to_group
from sp_core.errors import CollectiveMismatch, DtypeError
from sp_core.llama.config import LlamaConfig, check_ranks, check_tokens, stage_layers
from sp_core.llama.grid import Grid
from sp_core.llama.names import checkpoint_name
from sp_core.mask import Mask, Positions, document_positions
from sp_core.mesh import Mesh
from sp_core.nn.block import ParallelBlock, blocks_in
from sp_core.nn.gradients import Placement, placement_of
from sp_core.nn.loss import check_shard, next_token_loss
from sp_core.nn.memory import KEEP_ALL, Saving
from sp_core.nn.parallel import Embedding, Lengths, Norm, Weight, check_part, join, project
from sp_core.nn.replicated import check_hooks, learning, precision
from sp_core.nn.rope import rotation
from sp_core.schemes.heads import split_heads
from sp_core.sharding import Sharding, split_sizes

LayerAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: from the index among this stage's layers, q, k and v to the result."""
CAUSAL = Mask(causal=True)


@dataclass(frozen=True)
class Pass:
    """Tokens to send once through the layers of all stages, and how they attend.

    Args:
        tokens: this sequence rank's tokens, int64 (B, S), given on every stage.
        positions: the position of each of the S tokens in its own document, for rotary angles.
        attend: computes the attention of a layer for this rank's heads.
        lengths: with TP-SP, for each tensor rank the number of tokens that it has; else None.
        saving: how the layers save memory in training.
    """

    tokens: Tensor
    positions: Positions
    attend: LayerAttend
    lengths: Lengths = None
    saving: Saving = KEEP_ALL


class Llama(nn.Module):
    """A LLaMA model: this rank's part of the weights, at first uninitialised.

    `load` and `create` return one with weights; `fill` sets them. Parameters have the names of
    Hugging Face's LLaMA without "model.", and a placement (see `sp_core.nn.gradients`). Hooks on
    projections, the head and gradients are refused: they would see a part, or nothing.

    Args:
        config: the architecture.
        grid: the groups of ranks, as from `Grid.of`.
        dtype: the dtype of the weights and of all computation.
        tp_sp: whether to use TP-SP, which divides the memory of activations between layers by T;
            `Decoder.decode` ignores it. Gradients of norms are then summed over tensor ranks
            (`partial`).

    Attributes:
        own_layers: indices of this stage's layers.
        kv_heads: the key/value heads that this rank holds.
        kv_head_of: for each query head an index into `kv_heads`; None if no head is repeated.

    Raises:
        ShapeError: more tensor ranks than heads, feed-forward features or tokens in the vocabulary,
            or more stages than layers. On every rank.
        DtypeError: a dtype other than float64, float32, float16 and bfloat16. On this rank.
    """

    def __init__(
        self,
        config: LlamaConfig,
        grid: Grid,
        *,
        dtype: torch.dtype = torch.float32,
        tp_sp: bool = False,
    ) -> None:
        super().__init__()
        check_ranks(config, grid.tensor.size)
        if dtype not in FLOATS:
            raise DtypeError(f"dtype={dtype!r} was given; pass one of {FLOATS}.")
        self.config, self.grid, self.tp_sp, self.rope = config, grid, tp_sp, config.rope()
        comm = grid.tensor
        self.own_layers = stage_layers(config, grid.stages.size)[grid.stages.rank]
        if self.is_first or (self.is_last and config.tie_word_embeddings):
            self.embed_tokens = Embedding(
                config.vocab_size, config.hidden_size, comm, dtype, copy=not self.is_first
            )
        heads = config.num_attention_heads, config.num_key_value_heads
        sizes = config.hidden_size, config.intermediate_size, heads, config.head_dim
        held: Any = {"comm": comm, "dtype": dtype, "tp_sp": tp_sp}
        self.layers = nn.ModuleList(
            ParallelBlock(*sizes, config.rms_norm_eps, **held)
            if number in self.own_layers
            else nn.Module()
            for number in range(config.num_hidden_layers)
        )
        if self.is_last:
            self.norm = Norm(config.hidden_size, config.rms_norm_eps, comm, dtype, partial=tp_sp)
        if self.is_last and not config.tie_word_embeddings:
            shape = config.vocab_size, config.hidden_size
            self.lm_head = Weight(Placement.split(shape, 0, comm.size), comm, dtype)
        read = split_heads(*heads, comm.size)[1][comm.rank]
        self.kv_heads = sorted(set(read))
        self.kv_head_of = (
            None if list(read) == self.kv_heads else [self.kv_heads.index(head) for head in read]
        )

    @property
    def is_first(self) -> bool:
        """Return whether this rank's stage begins with the tokens."""
        return self.grid.stages.rank == 0

    @property
    def is_last(self) -> bool:
        """Return whether this rank's stage ends with the logits."""
        return self.grid.stages.rank == self.grid.stages.size - 1

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all parameters, in which the model computes.

        Raises:
            DtypeError: on this rank: they have several dtypes.
        """
        dtypes = {x.dtype for x in self.parameters()}
        if len(dtypes) > 1:
            raise DtypeError(
                f"the parameters have the dtypes {sorted(map(str, dtypes))}; a model computes in "
                f"one. Convert all of them, such as with model.float()."
            )
        return dtypes.pop()

    @property
    def precision(self) -> str:
        """Return the dtypes in which the model computes, as a text to compare between ranks."""
        return precision(self.dtype, self.grid.everyone.device)

    @torch.no_grad()
    def fill(self, read: Callable[[str, Placement], Tensor]) -> None:
        """Set each weight to this rank's part: what `read(name in a file, placement)` returns."""
        for name, parameter in self.named_parameters():
            parameter.copy_(read(checkpoint_name(name), placement_of(parameter)))

    def check_parts(self) -> None:
        """Raise an error, on this rank, for a replaced part, or a hook on a part or a gradient."""
        if torch.is_grad_enabled():
            check_hooks(self)
        for number in self.own_layers:
            for block in blocks_in(self.layers[number]):
                block.check_parts(f"layers.{number}")
        if self.is_last:
            tied = self.config.tie_word_embeddings
            name, kind = ("embed_tokens", Embedding) if tied else ("lm_head", Weight)
            check_part(name, self.head, kind)

    def join_weights(self) -> None:
        """Lay out the weights for products with few tokens; `nn.parallel.join` says how."""
        for number in self.own_layers:
            for block in blocks_in(self.layers[number]):
                block.join_weights()
        if self.is_last and not self.config.tie_word_embeddings:
            join(self.lm_head)

    def forward(self, tokens: Tensor, *, sharding: Sharding, mask: Mask = CAUSAL) -> Tensor:
        """Compute the logits of the next tokens, for this rank's part of the vocabulary.

        Every rank of the mesh calls this. After backward call `reduce_gradients`.

        Args:
            tokens: int64 (B, S/P), this rank's tokens in the order of `sharding`; equal on all T
                tensor ranks. Replicas may have different shapes.
            sharding: which of the P sequence ranks holds which tokens.
            mask: which query sees which key; rotary positions count from each document's beginning.

        Returns:
            (B, S/P, V/T).

        Communication:
            One agreement (32-byte all-reduce); with several tensor and several data ranks 64 bytes
            of each rank, too. With `check="agree"` each collective makes more. Per layer the
            messages of the attention scheme over the sequence ranks, and two all-reduces of
            (B, S/P, E) over the tensor ranks; one more for the embedding. The backward sends as
            much again. With `tp_sp` an all-gather of tokens and a reduce-scatter replace each
            all-reduce, also in the backward, which then repeats each all-gather of the forward.

        Raises:
            ShapeError, DtypeError, ValueError, TypeError: tokens or a mask that do not fit, tokens
                not in the vocabulary, or layers that are split over stages, for which there are
                `Decoder` and `pipeline.loss_and_gradients`. On every rank of the mesh.
            CollectiveMismatch: tensor ranks were given other tokens, shardings or masks; or the
                models differ. On every rank of the mesh.
        """
        one = self.begin(tokens, sharding, mask, KEEP_ALL, compare=self.grid.tensor.size > 1)
        return self.logits(self.hidden(tokens, one), one.lengths)

    def begin(
        self, tokens: Tensor, sharding: Sharding, mask: Mask, saving: Saving, *, compare: bool
    ) -> Pass:
        """Check arguments as `forward` does, on all ranks, and return the `Pass` of the tokens.

        `compare`: whether tensor ranks may have been given different arguments.
        """

        def call() -> str:
            return f"Llama({self.precision}, tp_sp={self.tp_sp}, {learning(self)})"

        def check() -> int:
            self.grid.check_one_stage()
            self.check_parts()
            self.check(tokens, sharding, mask)
            if not compare:
                return 0
            given = f"{self.grid.data.rank} {tuple(tokens.shape)} {sharding.fingerprint} {mask}"
            return crc32(tokens.long().cpu().numpy().tobytes(), crc32(given.encode()))

        seen = self.grid.everyone.agree_on(call, check)
        if len(set(seen)) > self.grid.data.size:
            raise CollectiveMismatch(
                f"{call()}: tensor ranks have other tokens, shardings or masks. Pass them alike."
            )
        return self.one_pass(tokens, sharding, mask, saving)

    def one_pass(self, tokens: Tensor, sharding: Sharding, mask: Mask, saving: Saving) -> Pass:
        """Return what all layers use in one forward pass over `tokens`; arguments as in `forward`.

        Weights that `join_weights` joined while frozen become contiguous again if they are
        trainable now.
        """
        torch.clear_autocast_cache()  # it may have casts of earlier weights, or without gradients
        for x in self.parameters():
            if x.requires_grad and not x.is_contiguous():
                with torch.inference_mode(x.is_inference()):  # as `join`
                    x.data = x.data.contiguous()
        attend = partial(self.attend, sharding=sharding, mask=mask)
        positions = document_positions(sharding.positions(self.grid.sequence.rank), mask)
        lengths = self.lengths(tokens.shape[1])
        return Pass(tokens, positions, lambda _, q, k, v: attend(q, k, v), lengths, saving)

    def lengths(self, count: int) -> Lengths:
        """Return how many of `count` tokens each tensor rank has; None if each has all of them."""
        return split_sizes(count, self.grid.tensor.size) if self.tp_sp else None

    def hidden(self, x: Tensor, one: Pass) -> Tensor:
        """Compute this stage's layers, and on the last stage the final norm.

        x is the tokens (B, S) on the first stage; on others the result of the previous stage. The
        result is (B, S, E), or (B, S/T, E) if the T tensor ranks split the tokens (`one.lengths`).
        """
        x = self.embed_tokens(x, one.lengths, self.config.padding) if self.is_first else x
        rotate = rotation(self.rope, one.positions, x)
        for place, layer in enumerate(self.layers[number] for number in self.own_layers):
            x = one.saving.apply(layer, x, rotate, partial(one.attend, place), one.lengths)
        return self.norm(x) if self.is_last else x

    def logits(self, hidden: Tensor, lengths: Lengths = None) -> Tensor:
        """Compute logits (B, S, V/T) of hidden states (B, S, E); with `lengths` (B, S/T, E)."""
        return project(hidden, self.head, lengths=lengths)[0]

    @property
    def head(self) -> Weight:
        """Return the output layer: `lm_head`, or the embedding if the two are tied."""
        return self.embed_tokens if self.config.tie_word_embeddings else self.lm_head

    def loss(
        self, hidden: Tensor, labels: Tensor, lengths: Lengths = None, count: int | None = None
    ) -> Tensor:
        """Compute the mean cross-entropy (`next_token_loss`) from the last stage's result.

        Args:
            hidden: (B, S/P, E), or (B, S/P/T, E) with `lengths`.
            labels: int64 (B, S/P), as from `next_token_labels`.
            lengths: with TP-SP, for each tensor rank the number of tokens that it has.
            count: as in `next_token_loss`.

        Communication:
            With `lengths` an all-gather of `hidden` over the tensor ranks, backward a
            reduce-scatter; else backward an all-reduce. Then as `next_token_loss`.
        """
        tensor, data = self.grid.tensor, self.grid.data
        if lengths is None:
            hidden = copy_to_group(hidden, comm=tensor)
        else:
            hidden = all_gather(hidden, comm=tensor, dim=1, sizes=lengths)
        weight = self.head.weight
        return next_token_loss(hidden, labels, tensor=tensor, data=data, count=count, head=weight)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sharding: Sharding,
        kv_sharding: Sharding | None = None,
        mask: Mask,
    ) -> Tensor:
        """Compute attention of this rank's heads and tokens by the scheme of the model's mesh.

        q and the result are (B, S/P, H/T, D), for P sequence ranks and T tensor ranks. k and v are
        (B, S'/P, K/T, D); `kv_sharding` splits their S' tokens, or if it is None `sharding`.
        """
        where = {"sharding": sharding, "kv_sharding": kv_sharding, "mask": mask}
        return cast("Tensor", self.grid.attention(q, self.spread(k), self.spread(v), **where))

    def spread(self, x: Tensor) -> Tensor:
        """Return key/value heads x (B, S, K/T, D), or (B, S, H/T, D) with one for each query head.

        Heads are repeated only if unequal numbers of this rank's query heads read them.
        """
        return x if self.kv_head_of is None else x[:, :, self.kv_head_of]

    def check(self, tokens: Tensor, sharding: Sharding, mask: Mask) -> None:
        """Raise an error, on this rank, if an argument of `forward` is wrong.

        Raises:
            ShapeError, DtypeError, ValueError, TypeError: the text says what is needed.
        """
        check_shard(tokens, self.grid.sequence, sharding)
        arguments.check_type("mask", mask, Mask, "Pass Mask(causal=True), which is the default.")
        mask.check_lengths(sharding.end)
        check_tokens(tokens, self.config)


def check_model(model: object) -> None:
    """Raise TypeError, on this rank only, if an object is no `Llama`."""
    arguments.check_type("model", model, Llama, "Make one with load or create.")


def create(
    config: LlamaConfig,
    mesh: Mesh,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scheme: str | None = None,
    tp_sp: bool = False,
) -> Llama:
    """Make a model with random weights. Every rank calls this, and holds its part of each weight.

    Args:
        config: the architecture.
        mesh: a mesh with any of the axes "dp", "pp", "ring", "ulysses" and "tp" (see `Grid`).
        seed: the seed of the weights; equal seeds give equal models on every mesh.
        dtype: the dtype of weights and computation. Weights are drawn in float64 and rounded to
            this dtype.
        scheme: as in `Grid.of`.
        tp_sp: as in `Llama`.

    Returns:
        The model. Weights of norms are 1, all others normal with standard deviation 0.02.

    Communication:
        Two agreements (32-byte all-reduces).

    Raises:
        ShapeError, ValueError: as `Llama` and `Grid.of`; CollectiveMismatch: ranks that ask for
            different models. On every rank.
    """
    grid = Grid.of(mesh, scheme)

    def make() -> tuple[Llama, str]:
        arguments.check(seed=seed, tp_sp=tp_sp)
        arguments.check_type(
            "config", config, LlamaConfig, "Make one, or read it with LlamaConfig.from_folder."
        )
        model = Llama(config, grid, dtype=dtype, tp_sp=tp_sp)
        return model, f"create({config}, {seed}, {dtype}, {tp_sp})"

    model = make_alike(grid.everyone, make)

    def draw(name: str, placement: Placement) -> Tensor:
        whole = torch.ones(placement.shape, dtype=torch.float64, device="cpu")
        if len(placement.shape) > 1:  # not the weight of a norm
            random = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
            whole.normal_(0.0, 0.02, generator=random)
        return placement.take(whole, grid.tensor.rank)

    model.fill(draw)
    return model
