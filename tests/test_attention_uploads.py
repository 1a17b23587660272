"""Test how often attention on a GPU copies masks and indices from the host.

No GPU is needed: tensors are on the meta device.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sp_core.attention import Logits, attend, attend_backward, cuda, kernels
from sp_core.mask import Mask, plan_blocks


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels of an H100 on the meta device, which checks schemas and shapes."""
    monkeypatch.setattr(kernels, "FUSED", {"meta"})
    monkeypatch.setattr(cuda, "capability", lambda device: (9, 0))


class Uploads(TorchDispatchMode):
    """A mode that counts copies from the host to another device, for which the host waits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.kernels = 0, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kernels += [func.name()] * ("attention" in func.name())
        if func.name() in ("aten::_to_copy", "aten::copy_"):
            given = args[1 if func.name() == "aten::copy_" else 0]
            self.count += given.device.type == "cpu" != result.device.type
        return result


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["efficient", "plain"])
def test_equal_masks_are_uploaded_once_a_pass(softcap: float | None) -> None:
    q, k = (torch.empty(2, heads, 700, 16, device="meta") for heads in (4, 2))
    mask = Mask(causal=True, window=64)
    here: dict[str, Any] = {"q_positions": range(700), "kv_positions": range(700), "mask": mask}
    logits = Logits(0.3, softcap=softcap)
    blocks = [block for block in plan_blocks(range(700), range(700), mask) if block.band]
    with Uploads() as forward:
        out, lse = attend(q, k, k, **here, logits=logits)
    with Uploads() as backward:
        attend_backward(q, q, k, k, out, lse, **here, logits=logits)
    different = len({(block.shape, block.band) for block in blocks})
    assert (forward.count, backward.count) == (different, different)
    assert different < len(blocks)


@pytest.mark.parametrize("causal", [True, False])
def test_indices_of_packed_documents_are_uploaded_once_for_all_layers(causal: bool) -> None:
    q, k = (torch.empty(2, heads, 72, 16, device="meta").bfloat16() for heads in (4, 2))
    ends = (0, 6, 8, 21, 23, 31, 72) if causal else (0, 5, 9, 26, 29, 44, 72)
    mask = Mask(causal=causal, documents=ends)
    here: dict[str, Any] = {"q_positions": range(72), "kv_positions": range(72), "mask": mask}
    counts = []
    for _ in range(3):
        with Uploads() as forward:
            out, lse = attend(q, k, k, **here, logits=Logits(0.3))
        with Uploads() as backward:
            attend_backward(q, q, k, k, out, lse, **here, logits=Logits(0.3))
        counts.append((forward.count, backward.count))
    assert forward.kernels == ["aten::_flash_attention_forward"]  # no document alone
    # the tokens of queries and of keys, and one vector of ends for both
    assert counts == [(3, 0), (0, 0), (0, 0)]
