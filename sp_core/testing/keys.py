"""Make keys of values: bytes that are the same for values that were made alike."""

import io
import pickle
import sys
from typing import Any


class _Pickler(pickle.Pickler):
    """Pickle the memory of torch's tensors as bytes. Torch's own pickle has its address."""

    def reducer_override(self, value: object) -> Any:
        torch: Any = sys.modules.get("torch")
        if not torch or not isinstance(value, torch.storage.TypedStorage):
            return NotImplemented
        memory = value._untyped_storage
        numbers = torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory.cpu())
        return tuple, ((value.dtype, memory.device, numbers.numpy().tobytes()),)


def key_of(value: object) -> bytes:
    """Return bytes that are the same for values that were made alike, also if they have tensors."""
    _Pickler(written := io.BytesIO()).dump(value)
    return written.getvalue()
