"""A process group of torch for tensors of the device: gloo, on copies in host memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device.build import NAME

c10d: Any = torch._C._distributed_c10d


class Group(c10d.ProcessGroup):  # type: ignore[misc]
    """The collectives that torch's context parallel asks for."""

    def __init__(self, store: Any, rank: int, size: int, patience: Any) -> None:
        super().__init__(rank, size)
        self._gloo = c10d.ProcessGroupGloo(store, rank, size, patience)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return what torch calls it."""
        return NAME

    @property
    def group_name(self) -> str:
        """Return the name by which torch finds it again."""
        name: str = vars(dist.distributed_c10d)["_world"].pg_names[self]
        return name

    def allgather_into_tensor_coalesced(
        self, into: list[Tensor], parts: list[Tensor], options: Any
    ) -> Any:
        """Gather each tensor."""
        for whole, part in zip(into, parts, strict=True):
            host = torch.empty_like(whole, device="cpu")
            pieces = list(host.chunk(self.size()))
            self._gloo.allgather([pieces], [part.cpu()]).wait()
            whole.copy_(host)
        return _done(into)

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # its later name

    def alltoall_base(
        self, into: Tensor, part: Tensor, lengths: list[int], sent: list[int], options: Any
    ) -> Any:
        """Exchange rows."""
        host = torch.empty_like(into, device="cpu")
        self._gloo.alltoall_base(host, part.cpu(), lengths, sent).wait()
        into.copy_(host)
        return _done([into])

    all_to_all_single = alltoall_base


def _done(found: list[Tensor]) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(found)
    return c10d._create_work_from_future(future)


def register() -> None:
    """Make torch take this group for tensors of the device."""
    dist.Backend.register_backend(NAME, Group, devices=[NAME])
