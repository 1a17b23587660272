"""Provide a torch process group for tensors of the device `late`: gloo on copies in host memory."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device.build import NAME

c10d: Any = torch._C._distributed_c10d


class Group(c10d.ProcessGroup):  # type: ignore[misc]
    """A process group with the collectives that torch's context parallelism calls."""

    def __init__(self, store: Any, rank: int, size: int, patience: Any) -> None:
        super().__init__(rank, size)
        self._gloo = c10d.ProcessGroupGloo(store, rank, size, patience)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return NAME

    @property
    def group_name(self) -> str:
        """Return the name under which torch has registered this group."""
        name: str = vars(dist.distributed_c10d)["_world"].pg_names[self]
        return name

    def allgather_into_tensor_coalesced(
        self, into: list[Tensor], parts: list[Tensor], options: Any
    ) -> Any:
        """Gather each tensor of `parts` from all ranks into the tensor of `into` at its place."""
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
        """Send `sent[r]` rows of `part` to each rank r, and receive `lengths[r]` rows from it."""
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
    """Make torch use this group for tensors of the device."""
    dist.Backend.register_backend(NAME, Group, devices=[NAME])
