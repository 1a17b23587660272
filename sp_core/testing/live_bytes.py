"""Count the bytes of tensors that are alive on a CPU, where torch keeps no such count."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all tensors that are alive at once, while this mode is active.

    Only tensors of this thread count. Other memory of the process (MPI's buffers, scratch memory
    inside one kernel) is not seen.

    Args:
        tensors: the tensors that are alive when the mode begins.

    Attributes:
        peak: the greatest number of bytes that were alive at once.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        TorchDispatchMode.__init__(self)
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        # _most is at least `now`: the bytes at the last count, and all made since
        self.peak = self._most = 0
        self._note(tensors)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here. With True torch imports 70 MB of its compiler."""
        return False

    @property
    def now(self) -> int:
        """The bytes that are alive at this moment."""
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self._most = sum(nbytes for _, nbytes in self._alive.values())
        return self._most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count the bytes that are alive after it."""
        result = func(*args, **(kwargs or {}))
        self._note(x for x in tree_leaves(result) if isinstance(x, Tensor))
        return result

    def _note(self, tensors: Iterable[Tensor]) -> None:
        for storage in (x.untyped_storage() for x in tensors):
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in self._alive or self._alive[key][1] != nbytes:
                # as long as the weak reference is there, no other storage gets this key
                self._alive[key] = (StorageWeakRef(storage), nbytes)
                self._most += nbytes
        # counting after each operation would take longer than the operations
        if self._most > self.peak:
            self.peak = max(self.peak, self.now)
