"""Train a tiny model in float64 with Trainer on the ranks of `mpiexec`; rank 0 writes the losses.

    python tests/hf/losses.py KIND SCHEME RESULT.json

One rank trains as transformers does without `parallelize`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

import sp_core as sp
from hf.cases import in_float64, inputs, model
from sp_core.integrations.transformers import one_process, parallelize

STEPS = 20


class Recording(Trainer):
    """Keeps the loss of every micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(float(loss))
        return loss


def rows(packed: bool) -> list[dict[str, torch.Tensor]]:
    batches = [inputs(packed, seed) for seed in range(8)]
    return [
        {name: x[0] if len(x) == 1 else x[row] for name, x in batch.items()}
        for batch in batches
        for row in range(2)
    ]


def train(trained: Any, folder: str, packed: bool) -> list[float]:
    with one_process():
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=packed,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        )
    trainer = Recording(trained, arguments, train_dataset=rows(packed))
    with in_float64():
        trainer.train()
    assert len(trainer.losses) == 2 * STEPS
    return trainer.losses


def main(comm: Any, kind: str, scheme: str, result: str) -> None:
    packed = kind != "qwen3_moe"
    axes = {"ring": 2, "ulysses": 2} if scheme == "hybrid" else {"ring": comm.size}
    if comm.size == 1:
        losses = [train(model(kind), result + ".out", packed)]
    else:
        with sp.Mesh(comm, **axes) as mesh:
            parallel = parallelize(model(kind), mesh, scheme)
            losses = comm.allgather(train(parallel, result + ".out", packed))
    if comm.rank == 0:
        Path(result).write_text(json.dumps(losses))


if __name__ == "__main__":
    from mpi4py import MPI

    main(MPI.COMM_WORLD, *sys.argv[1:])
