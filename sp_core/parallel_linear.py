"""Linear layers whose weight is split over the ranks of a group, for tokens that are split over the same ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sp_core import arguments
from sp_core.collectives.build import check_tensor
from sp_core.collectives.differentiable import copy_to_group
from sp_core.collectives.maps import AllGather
from sp_core.communicator import Communicator
from sp_core.errors import DtypeError, ShapeError
from sp_core.schemes.tp_sp import gather_linear, linear_scatter
from sp_core.sharding import Sharding, split_sizes


class _ParallelLinear(nn.Module):
    """What the two kinds share: `sizes` of the ranks along the dim of the weight that is split."""

    split_dim: int

    def __init__(self, linear: nn.Linear, comm: Communicator, sharding: Sharding, sizes: Sequence[int] | None) -> None:
        super().__init__()
        arguments.check_communicator(comm)
        self.comm = comm
        self.sharding = sharding
        self.sizes = self._agreed_sizes(linear, sizes)
        part = linear.weight.detach().split(list(self.sizes), self.split_dim)[comm.rank]
        self.weight = nn.Parameter(part.clone().to(comm.device), requires_grad=linear.weight.requires_grad)

    def _agreed_sizes(self, linear: nn.Linear, sizes: Sequence[int] | None) -> tuple[int, ...]:
        kind = type(self).__name__

        def cut() -> tuple[int, ...]:
            return split_sizes(linear.weight.shape[self.split_dim], self.comm.size) if sizes is None else tuple(sizes)

        def check() -> int:
            arguments.check_type("linear", linear, nn.Linear, "Pass the whole layer.")
            arguments.check_type("sharding", self.sharding, Sharding, "Make one, such as Sharding.contiguous(seq_len, size).")
            arguments.check(sizes=sizes)
            features = linear.weight.shape[self.split_dim]
            if len(cut()) != self.comm.size or min(cut()) < 0 or sum(cut()) != features:
                raise ShapeError(
                    f"{kind}: sizes={cut()} were given; {self.comm.size} sizes >= 0 that add up to {features} are needed."
                )
            if self.sharding.size != self.comm.size:
                raise ShapeError(f"{kind}: the sharding is for {self.sharding.size} ranks, {self.comm.name} has {self.comm.size}.")
            return 0

        def call() -> str:
            shown = f"{tuple(linear.weight.shape)}, {linear.weight.dtype}, bias={linear.bias is not None}"
            return f"{kind}.from_linear({shown}, sizes={cut()}, {self.sharding.fingerprint}) on {self.comm.name}"

        self.comm.agree_on(call, check)
        return cut()

    def _whole_bias(self) -> Tensor | None:
        raise NotImplementedError

    def _check(self, x: Tensor, tokens: int, features: int) -> None:
        """Compare a call over the ranks."""
        kind = type(self).__name__

        def check() -> int:
            check_tensor(x, self.comm)
            if x.dim() != 3 or x.shape[1] != tokens or x.shape[2] != features:
                raise ShapeError(
                    f"{kind}: x has shape {tuple(x.shape)}; (batch, {tokens}, {features}) is needed on rank {self.comm.rank}."
                )
            if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(x.device.type):
                raise DtypeError(f"{kind} has weights of {self.weight.dtype} and was given {x.dtype}. Convert one of them.")
            return 0

        def call() -> str:
            grad = torch.is_grad_enabled() and (x.requires_grad, self.weight.requires_grad)
            return f"{kind}(batch {x.shape[0]}, {x.dtype}, requires_grad={grad}) on {self.comm.name}"

        self.comm.agree_on(call, check)

    def to_linear(self) -> nn.Linear:
        """The whole layer again, on every rank.

        Communication:
            One agreement, one all-gather of the weight, and one of the bias if each rank has a part of it.
        """
        self.comm.agree_on(lambda: f"{type(self).__name__}.to_linear() on {self.comm.name}", lambda: 0)
        weight = AllGather(self.comm, self.split_dim, self.sizes).run(self.weight.detach())
        bias = self._whole_bias()
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, weight.device, weight.dtype)
        linear.weight.data.copy_(weight)
        if bias is not None:
            linear.bias.data.copy_(bias)
        return linear


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which each rank has some output features; it gathers the tokens.

    Weight `(sizes[rank], in_features)`, bias `(sizes[rank],)`. Made by `from_linear`.
    """

    split_dim = 0

    def __init__(self, linear: nn.Linear, comm: Communicator, sharding: Sharding, sizes: Sequence[int] | None) -> None:
        super().__init__(linear, comm, sharding, sizes)
        self.bias: nn.Parameter | None = None
        if linear.bias is not None:
            part = linear.bias.detach().split(list(self.sizes))[comm.rank]
            self.bias = nn.Parameter(part.clone().to(comm.device), requires_grad=linear.bias.requires_grad)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, comm: Communicator, sharding: Sharding, sizes: Sequence[int] | None = None
    ) -> ColumnParallelLinear:
        """Take this rank's part of an ordinary layer that all ranks hold alike.

        Args:
            linear: the whole layer.
            comm: the ranks.
            sharding: who owns which tokens.
            sizes: output features of each rank; even if not given.

        Raises:
            ShapeError: sizes or a sharding that do not fit; CollectiveMismatch: ranks that differ. On every rank.
        """
        return cls(linear, comm, sharding, sizes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S/P, E) to (B, S, sizes[rank]), the tokens in the order of an all-gather.

        Communication:
            As `sp_core.schemes.tp_sp.gather_linear`.
        """
        self._check(x, self.sharding.local_len(self.comm.rank), self.weight.shape[1])
        return gather_linear(x, self.weight, self.bias, comm=self.comm, lengths=self.sharding.lengths)

    def _whole_bias(self) -> Tensor | None:
        return None if self.bias is None else AllGather(self.comm, 0, self.sizes).run(self.bias.detach())


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which each rank has some input features; it sums over the ranks and gives each its tokens.

    Weight `(out_features, sizes[rank])`; the bias `(out_features,)` is held alike by all ranks and its gradient is summed over
    them. Made by `from_linear`.
    """

    split_dim = 1

    def __init__(self, linear: nn.Linear, comm: Communicator, sharding: Sharding, sizes: Sequence[int] | None) -> None:
        super().__init__(linear, comm, sharding, sizes)
        self.bias: nn.Parameter | None = None
        if linear.bias is not None:
            whole = linear.bias.detach().clone().to(comm.device)
            self.bias = nn.Parameter(whole, requires_grad=linear.bias.requires_grad)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, comm: Communicator, sharding: Sharding, sizes: Sequence[int] | None = None
    ) -> RowParallelLinear:
        """Take this rank's part of an ordinary layer; arguments and errors as in `ColumnParallelLinear.from_linear`."""
        return cls(linear, comm, sharding, sizes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, sizes[rank]), tokens in the order of an all-gather, to (B, S/P, E).

        Communication:
            As `sp_core.schemes.tp_sp.linear_scatter`, and an all-reduce of the bias gradient backward.
        """
        self._check(x, self.sharding.seq_len, self.weight.shape[1])
        out = linear_scatter(x, self.weight, comm=self.comm, lengths=self.sharding.lengths)
        return out if self.bias is None else out + copy_to_group(self.bias, comm=self.comm)

    def _whole_bias(self) -> Tensor | None:
        return self.bias
