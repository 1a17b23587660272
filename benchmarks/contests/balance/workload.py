"""What is computed: a byte-level LLaMA, and the standard library's files, each shortened to a part of its bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.corpus import source_files
from sp_core.gradients import Placement
from sp_core.llama import Grid, Llama, LlamaConfig
from sp_core.llama.unequal import work_of
from sp_core.mesh import Mesh
from sp_core.scheduling import POLICIES, Plan, Work

SHORTER = 64
"""The length of a sequence is that of its file in bytes over this, rounded up."""
NOT_RUN = "padded"
"""Planned only: it would compute a hundred times as much."""
GAIN = 0.5  # width of the random weights, times 1/sqrt(fan in)


class Setting(msgspec.Struct, frozen=True):
    """What a launch does.

    Args:
        ranks: of the launch.
        rounds: in which the policies take turns; 0 counts operations and times nothing.
        hidden, heads, kv_heads, head_dim, ffn, layers: of the model.
        most: sequences that are taken from the workload, evenly spread; 0 for all.
        seed: of weights and order.
    """

    ranks: int = 2
    rounds: int = 6
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 176
    layers: int = 2
    most: int = 0
    seed: int = 0

    @property
    def config(self) -> LlamaConfig:
        """The architecture."""
        return LlamaConfig(
            vocab_size=256,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=1 << 20,
        )

    def sequences(self) -> list[list[int]]:
        """The tokens of each sequence, which are bytes."""
        texts = [list(text[: -(-len(text) // SHORTER)]) for text in source_files()]
        return texts if not self.most else texts[:: max(len(texts) // self.most, 1)][: self.most]

    def model(self, mesh: Mesh) -> Llama:
        """The model, with the same random weights on any mesh."""
        grid = Grid.of(mesh)
        model = Llama(self.config, grid)

        def draw(name: str, placement: Placement) -> Tensor:
            random = torch.Generator().manual_seed(self.seed + sum(name.encode()) * 131 + len(name))
            shape = placement.shape
            width = GAIN * shape[-1] ** -0.5 if len(shape) == 2 else 0.0
            return placement.take(torch.randn(shape, generator=random) * width + (len(shape) == 1), grid.tensor.rank)

        model.fill(draw)
        return model


def plans(lengths: list[int], setting: Setting) -> dict[str, Plan]:
    """What each policy makes of the workload."""
    return {name: policy(lengths, setting.ranks, work_of(setting.config)) for name, policy in POLICIES.items()}


def predicted(plan: Plan, work: Work) -> dict[str, Any]:
    """Loads by the cost model, and the share of the ranks' time that goes into what was asked for."""
    loads = plan.loads(work)
    return {
        "loads": list(loads),
        "sharded": len(plan.sharded),
        "useful_share": plan.useful(work) / (max(loads) * plan.size) if max(loads) else 1.0,
    }
