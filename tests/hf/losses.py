"""Train tiny models in float64 with Trainer on the ranks of `mpiexec`; print the losses of each.

    python tests/hf/losses.py FOLDER

A single rank trains without `parallelize`, and prints one line of losses for each architecture.
With several ranks there is a line for each rank of each architecture.
"""

import sys
from typing import Any

import torch
from mpi4py import MPI
from transformers import Trainer, TrainingArguments

import sp_core as sp
from hf.cases import OWN, InFloat64, inputs, model
from sp_core import schemes
from sp_core.integrations.transformers import one_process, parallelize

STEPS = 20
SCHEMES = (*schemes.SCHEMES, "hybrid")


class Recording(Trainer):
    """A Trainer that keeps the loss of every micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(float(loss))
        return loss


def rows(packed: bool) -> list[dict[str, torch.Tensor]]:
    """Return the training data: one dict of tensors for each whole sequence."""
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
            gradient_checkpointing=True,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        )
    trainer = Recording(trained, arguments, train_dataset=rows(packed))
    with InFloat64():
        trainer.train()
    return trainer.losses


if __name__ == "__main__":
    for number, kind in enumerate(OWN):
        packed = kind != "gpt_oss"  # transformers ignores documents of gpt-oss
        if MPI.COMM_WORLD.size == 1:
            print("losses:", *train(model(kind), sys.argv[1], packed))
            continue
        scheme = SCHEMES[number % len(SCHEMES)]
        with sp.Mesh(MPI.COMM_WORLD, ring=2, ulysses=2) as mesh:
            found = train(parallelize(model(kind), mesh, scheme), sys.argv[1], packed)
            for losses in MPI.COMM_WORLD.gather(found) or []:
                print("losses:", *losses)
