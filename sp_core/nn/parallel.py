"""Tensor-parallel layers, whose weights are split over the ranks of a group.

Public are `ColumnParallelLinear` and `RowParallelLinear`; `sp_core.llama` uses the other classes.
A layer that splits output features (column) is followed by one that splits input features (row).
Outside such pairs each rank holds all tokens, or with Megatron's TP-SP only some of them:

    all     x (B, S, E)      copy_to_group(x) W_r^T  ->  reduce_from_group(y_r W_r^T)
    TP-SP   x_r (B, S/T, E)  all_gather(x_r) W_r^T   ->  reduce_scatter(y_r W_r^T)

`lengths` has the number of tokens S/T of each rank outside the pairs; None means all tokens.
Shapes: B batch, S tokens (of one sequence rank, if a sequence is split), E model dim, V vocabulary,
T tensor ranks. `/T` is this rank's part, maybe uneven. (B, S or S/T, E) is (B, S/T, E) with
`lengths`, else (B, S, E).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init
from torch.nn.utils.parametrize import is_parametrized

from sp_core import arguments
from sp_core.agreement import make_alike
from sp_core.collectives.api import reduce_scatter
from sp_core.collectives.build import SUMMABLE, Sizes
from sp_core.collectives.differentiable import copy_to_group, reduce_from_group
from sp_core.collectives.maps import AllGather
from sp_core.communicator import Communicator
from sp_core.errors import DeviceError, ShapeError
from sp_core.nn.gradients import Placement, place
from sp_core.nn.replicated import autocast_dtype, check_input, gradient_hooks, is_plain
from sp_core.schemes.tp_sp import gather_linears, linear_scatter
from sp_core.segments import within
from sp_core.sharding import Sharding, check_sharding, split_sizes

Lengths = tuple[int, ...] | None


class Weight(nn.Module):
    """Hold this rank's part of a weight that is cut as `placement` says. It is uninitialised.

    The attribute `bias` is None unless a subclass sets it.
    """

    def __init__(self, placement: Placement, comm: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        self.comm = comm
        part = torch.empty(placement.local_shape(comm.rank), dtype=dtype, device=comm.device)
        self.placements = {"weight": placement}
        self.weight = place(nn.Parameter(part), placement)
        self.bias: nn.Parameter | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or pickled module, and the placements that copied parameters lose."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._place()

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        """Load as `nn.Module`, and restore the placements that new parameters do not have."""
        super()._load_from_state_dict(*given, **named)
        self._place()

    def _apply(self, *given: Any, **named: Any) -> Self:
        """Convert as `nn.Module`, and restore the placements that new parameters do not have."""
        super()._apply(*given, **named)  # type: ignore[no-untyped-call]
        self._place()
        return self

    def _place(self) -> None:
        for name, placement in self.placements.items():
            if isinstance(held := self._parameters.get(name), nn.Parameter):
                place(held, placement)


def check_part(name: str, part: nn.Module, kind: type[nn.Module] = Weight) -> None:
    """Raise TypeError, on this rank, if a module that is read but never called was changed.

    `name` is the name of the module in the model, and `kind` the class that the model gave it.
    """
    if not is_plain(part, kind):
        found = "has hooks" if type(part) is kind else f"is a {type(part).__name__}"
        raise TypeError(
            f"{name} {found}; needed is the {kind.__name__} that the model made, without hooks or "
            "parametrizations, because the model reads its weights and does not call it. Merge "
            "terms such as LoRA into the weights; register hooks on a whole layer, as layers.0."
        )


def join(*layers: Weight) -> None:
    """Lay out the weights (out/T, E) of layers with the same input side by side in memory.

    `project` then needs one product for all of them while no gradients are recorded. On a CPU wide
    matrices of float32 or float64 are laid out by columns if all their weights are frozen: a
    product with one token reads these 1.2 to 1.9 times as fast. Trainable weights stay contiguous,
    because fused optimizers need that. Values, shapes and names of the parameters do not change.
    """
    sizes, columns = [len(layer.weight) for layer in layers], layers[0].weight.shape[1]
    total, like, before = sum(sizes), layers[0].weight.data, _side_by_side(layers)
    by_columns = like.device.type == "cpu" and like.itemsize >= 4 and total >= columns
    by_columns &= not any(layer.weight.requires_grad for layer in layers)
    strides = (1, total) if by_columns else (columns, 1)
    if before is not None and before.stride() == strides:
        return
    # a weight with memory of inference mode could never be trained again
    with torch.inference_mode(layers[0].weight.is_inference()):
        whole = like.new_empty_strided((total, columns), strides)
        for layer, part in zip(layers, whole.split(sizes), strict=True):
            layer.weight.data = part.copy_(layer.weight.data)


def _side_by_side(layers: Sequence[Weight]) -> Tensor | None:
    """Return the weights of layers as one matrix if they lie side by side, as `join` puts them."""
    first = layers[0].weight
    place, strides = first.data_ptr(), first.stride()
    begin = first.untyped_storage().data_ptr()
    for x in (layer.weight for layer in layers):
        if (x.untyped_storage().data_ptr(), x.data_ptr(), x.stride()) != (begin, place, strides):
            return None
        place += len(x) * strides[0] * x.itemsize
    return first.as_strided((sum(len(layer.weight) for layer in layers), first.shape[1]), strides)


def project(x: Tensor, *layers: Weight, lengths: Lengths) -> tuple[Tensor, ...]:
    """Apply each layer to x (B, S or S/T, E). Return this rank's features (B, S, out/T) of each.

    Communication:
        None in the forward, and one all-reduce of the gradient of x in the backward. With `lengths`
        (the S/T of each rank) the messages of `gather_linears` instead.
    """
    pairs, comm = [(layer.weight, layer.bias) for layer in layers], layers[0].comm
    if lengths is not None:
        return gather_linears(x, pairs, comm=comm, lengths=lengths)
    may_join = len(pairs) > 1 and not torch.is_grad_enabled()
    if may_join and (whole := _side_by_side(layers)) is not None:
        return tuple(F.linear(x, whole).split([len(weight) for weight, _ in pairs], -1))
    x = x if comm.size == 1 else copy_to_group(x, comm=comm)
    return tuple(F.linear(x, weight, bias) for weight, bias in pairs)


def sum_over_ranks(y: Tensor, layer: Weight, *, lengths: Lengths) -> Tensor:
    """Multiply features y (B, S, in/T) by this rank's part of a weight, and sum over the ranks.

    Return (B, S, E), or with `lengths` (the S/T of each rank) this rank's tokens (B, S/T, E).

    Communication:
        One all-reduce, and none in the backward. With `lengths` a reduce-scatter instead, and an
        all-gather in the backward.
    """
    if lengths is not None:
        return linear_scatter(y, layer.weight, comm=layer.comm, lengths=lengths)
    y = F.linear(y, layer.weight)
    return y if layer.comm.size == 1 else reduce_from_group(y, comm=layer.comm)


class Norm(Weight):
    """Divide a token's E features by their root mean square, and multiply by a weight (E,).

    Every rank holds the whole weight. With `partial` the ranks use the weight for different tokens.

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization, arXiv:1910.07467,
    equation 4.
    """

    def __init__(
        self, hidden: int, eps: float, comm: Communicator, dtype: torch.dtype, *, partial: bool
    ) -> None:
        super().__init__(Placement.replicated((hidden,), comm.size, partial=partial), comm, dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Apply RMS norm to the last dim of x (..., E), and return the same shape. No messages."""
        out = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return out.to(x.dtype)  # autocast of torch 2.12 returns float32 on a GPU


class Embedding(Weight):
    """A token embedding, of which each rank holds the vectors of a range of the vocabulary.

    With `copy` this is the tied output head of a later pipeline stage, left out of gradient norms.
    """

    def __init__(
        self, vocab: int, hidden: int, comm: Communicator, dtype: torch.dtype, *, copy: bool
    ) -> None:
        placement = replace(Placement.split((vocab, hidden), 0, comm.size), copy=copy)
        super().__init__(placement, comm, dtype)

    def forward(self, tokens: Tensor, lengths: Lengths, pad: int | None) -> Tensor:
        """Return vectors (B, S or S/T, E) of int64 tokens (B, S), which are equal on every rank.

        As with `padding_idx` of `nn.Embedding`, the vector of the token `pad` gets no gradient.

        Communication:
            One all-reduce of (B, S, E), with `lengths` (the S/T of each rank) a reduce-scatter.
        """
        (own,) = self.placements["weight"].held[self.comm.rank]
        places, here = within(tokens, own)
        row = pad - own.start if pad is not None and pad in own else None
        vectors = F.embedding(places, self.weight, row).where(here.unsqueeze(-1), 0.0)
        if lengths is not None:
            return reduce_scatter(vectors, comm=self.comm, dim=1, sizes=lengths)
        return reduce_from_group(vectors, comm=self.comm)


class _ParallelLinear(Weight):
    """Split an `nn.Linear` along `split_dim` of its weight, with sizes[r] features on rank r."""

    split_dim: int

    def __init__(
        self, linear: nn.Linear, comm: Communicator, sharding: Sharding | None, sizes: Sizes
    ) -> None:
        arguments.check_communicator(comm)
        cut = make_alike(comm, partial(_sizes_and_call, type(self), linear, comm, sharding, sizes))
        held = tuple((range(start, stop),) for start, stop in pairwise(accumulate(cut, initial=0)))
        placement = Placement(tuple(linear.weight.shape), self.split_dim, held)
        super().__init__(placement, comm, linear.weight.dtype)
        self.sizes, self.lengths = cut, None if sharding is None else sharding.lengths
        if linear.bias is not None:
            whole = Placement.replicated(linear.bias.shape, comm.size)
            self.placements["bias"] = whole if self.split_dim else replace(whole, held=held)
        for name, placement in self.placements.items():
            parameter = getattr(linear, name)
            part = placement.take(parameter.detach(), comm.rank).to(comm.device)
            setattr(self, name, place(nn.Parameter(part, parameter.requires_grad), placement))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        comm: Communicator,
        sharding: Sharding | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Self:
        """Copy this rank's part of a layer. One 32-byte all-reduce.

        Args:
            linear: the whole layer, equal on all ranks. Only its weight and bias are copied, so it
                must not have hooks (also on gradients), parametrizations or a `forward` of its own.
            comm: the communicator whose ranks split the layer. All of them call this.
            sharding: which rank holds which tokens outside a pair of a column and a row layer;
                None if every rank holds all tokens.
            sizes: for each rank its number of features, of the output (`ColumnParallelLinear`) or
                the input (`RowParallelLinear`); as even as possible if not given.

        Raises:
            ShapeError: sizes or sharding do not fit the layer or `comm`; on every rank.
            TypeError: `linear` has hooks, or computes more than `nn.Linear` does; on every rank.
            DeviceError: `linear` is on the device meta; on every rank.
            CollectiveMismatch: the ranks' arguments differ; on every rank.
        """
        return cls(linear, comm, sharding, sizes)

    def _check_parts(self, dtypes: tuple[torch.dtype, ...] | None = None) -> None:
        """Raise an error, on this rank, if weight or bias cannot be sent or has another dtype."""
        for name, parameter in self.named_parameters():
            arguments.check_tensor(parameter, self.comm, name, dtypes)

    def to_linear(self) -> nn.Linear:
        """Return the whole layer as an `nn.Linear` on every rank. Every rank calls this.

        Weight and bias require a gradient if those of the parts do.

        Communication:
            One 32-byte all-reduce, one all-gather of the weight, and one of a split bias.

        Raises:
            CollectiveMismatch: the ranks' dtypes differ, or only some have a bias; on every rank.
            DeviceError, DtypeError: a parameter cannot be sent; on every rank.
        """
        kinds = {name: part.dtype for name, part in self.named_parameters()}
        call = f"{type(self).__name__}.to_linear() of {kinds} on {self.comm.name}"
        self.comm.agree_on(lambda: call, self._check_parts)
        gather = AllGather(self.comm, self.split_dim, self.sizes).run
        weight = gather(self.weight.detach())
        where: Any = {"device": weight.device, "dtype": weight.dtype}
        linear: nn.Linear = skip_init(  # which draws no random numbers
            nn.Linear, weight.shape[1], weight.shape[0], self.bias is not None, **where
        )
        linear.weight.data.copy_(weight)
        linear.weight.requires_grad_(self.weight.requires_grad)
        if self.bias is not None:
            linear.bias.requires_grad_(self.bias.requires_grad)
            bias = self.bias.detach()
            linear.bias.data.copy_(bias if self.split_dim else gather(bias))
        return linear

    def _agree(self, x: Tensor, tokens: int | None) -> None:
        """Check x, and that all ranks make the same call; `tokens` as in `check_input`."""

        def call() -> str:
            kind = type(self).__name__
            check_input(x, self.comm, kind, self.weight, self.weight.shape[1], tokens)
            self._check_parts(SUMMABLE)
            arguments.check_kept(x, *self.parameters())
            shape = tuple(x.shape[:-1]) if tokens is None else f"batch {x.shape[0]}"
            grad = torch.is_grad_enabled(), *(w.requires_grad for w in (x, *self.parameters()))
            more = f"requires_grad={grad}, autocast={autocast_dtype(x.device)}"
            return f"{kind}({shape}, {x.dtype}, {more}) on {self.comm.name}"

        self.comm.agree_on(call)


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which each rank computes some output features, for all tokens.

    `forward` first gathers the tokens if a sharding splits them. `from_linear` makes such layers.

    Weight `(sizes[rank], in_features)`, bias `(sizes[rank],)`. The attribute sizes has the number
    of output features of each rank.
    """

    split_dim = 0

    def forward(self, x: Tensor) -> Tensor:
        """Gather x (B, S/T, E) in rank order. Return this rank's features (B, S, sizes[rank]).

        Every rank calls this. The tokens are in the order of an all-gather, which
        `Sharding.restore` sorts. Without a sharding x is (..., E), all tokens, equal on every rank,
        and the result (..., sizes[rank]).

        Communication:
            One agreement (32-byte all-reduce), then all-gathers: a rank sends `(T-1) * B*(S/T)*E`
            elements. Backward the same again, and reduce-scatters of `B*(S - S/T)*E`. Without a
            sharding one all-reduce of the gradient of x, in the backward, replaces these messages.
        """
        self._agree(x, None if self.lengths is None else self.lengths[self.comm.rank])
        with self.comm.agreed():  # under autocast the product has a different dtype
            return project(x, self, lengths=self.lengths)[0].to(x.dtype)


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which each rank holds some input features, of all tokens.

    `forward` sums over the ranks. Each rank gets its own tokens, or all without a sharding.

    Weight `(out_features, sizes[rank])`; every rank holds the bias `(out_features,)`, and gets its
    gradient over all tokens in backward. The attribute sizes has the number of input features of
    each rank. `from_linear` makes such layers.
    """

    split_dim = 1

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, S, sizes[rank]), all tokens in rank order, to this rank's (B, S/T, E).

        E is `out_features`. Every rank calls this. Without a sharding x is (..., sizes[rank]), and
        the result (..., E), all tokens.

        Communication:
            One agreement (32-byte all-reduce), then reduce-scatters: a rank sends `B*(S - S/T)*E`
            elements. Backward all-gathers of `(T-1) * B*(S/T)*E`, and an all-reduce of the bias
            gradient. Without a sharding one all-reduce of the result replaces these messages.
        """
        self._agree(x, None if self.lengths is None else sum(self.lengths))
        with self.comm.agreed():
            out = sum_over_ranks(x, self, lengths=self.lengths).to(x.dtype)
            if self.bias is None:
                return out
            bias = self.bias if self.lengths is None else copy_to_group(self.bias, comm=self.comm)
        return (out + bias).to(x.dtype)


def _sizes_and_call(
    kind: type[Any], linear: Any, comm: Communicator, sharding: Sharding | None, sizes: Sizes
) -> tuple[tuple[int, ...], str]:
    """Check the arguments of `from_linear`. Return `sizes`, made if None, and the call as text."""
    remedy = (
        "Pass the whole layer, without hooks, parametrizations or a forward of its own. Merge what "
        "these compute into its weight."
    )
    arguments.check_type("linear", linear, nn.Linear, remedy)
    is_changed = type(linear).forward is not nn.Linear.forward or is_parametrized(linear)
    is_hooked = any(map(gradient_hooks, linear.parameters()))
    if is_changed or is_hooked or not is_plain(linear, type(linear)):
        raise TypeError(
            f"linear is a {type(linear).__name__} that does more than its weight says. {remedy}"
        )
    if linear.weight.is_meta:
        raise DeviceError("linear is on the device meta, without values. Load its weights first.")
    arguments.check(sizes=sizes)
    if sharding is not None:
        check_sharding(sharding, comm, kind.__name__)
    features = linear.weight.shape[kind.split_dim]
    cut = split_sizes(features, comm.size) if sizes is None else arguments.plain(sizes)
    if len(cut) != comm.size or min(cut) < 0 or sum(cut) != features:
        raise ShapeError(
            f"{kind.__name__}: sizes={cut} were given; {comm.size} sizes >= 0 that add up to "
            f"{features} are needed."
        )
    shown = f"{tuple(linear.weight.shape)}, {linear.weight.dtype}, bias={linear.bias is not None}"
    tokens = "all tokens" if sharding is None else sharding.fingerprint
    return cut, f"{kind.__name__}.from_linear({shown}, sizes={cut}, {tokens}) on {comm.name}"
