"""A program that resumes training from its last checkpoint, and may be killed while it writes one.

case_resume.py FOLDER AXES STEPS EVERY KILLED: it saves a checkpoint every EVERY steps, and its
rank 0 kills itself in the middle of the checkpoint after step KILLED.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import sp_core as sp
from benchmarks.training.runs import Setting, move_by_one_ulp
from sp_core.llama import checkpoint, create
from sp_core.llama.train import load_training, save_training, train_step

SIZES = {"vocab_size": 256, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
SETTING = Setting(model=SIZES | HEADS, longest=48)


def trained(
    comm: Any,
    axes: dict[str, Any],
    steps: int,
    folder: Path | None = None,
    *,
    every: int = 0,
    ulps: int = 0,
) -> list[tuple[int, float]]:
    """Train, from the last checkpoint in `folder` if any. Return (number, loss) of each step."""
    losses = []
    with sp.Mesh(comm, **axes) as mesh:
        model = create(SETTING.config, mesh, seed=SETTING.seed, dtype=torch.float64)
        if ulps:
            move_by_one_ulp(model, ulps)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        order = torch.Generator().manual_seed(1)
        parts: dict[str, Any] = {"optimizer": optimizer, "scheduler": schedule, "generator": order}
        saved = sorted(folder.glob("step-*")) if folder else []
        start = load_training(model, saved[-1], **parts) if saved else 0
        for step in range(start + 1, steps + 1):
            batch = SETTING.batch(int(torch.randint(0, 10**6, (), generator=order)))
            losses.append((step, train_step(model, optimizer, batch, max_norm=1.0).loss))
            schedule.step()
            if folder and comm.rank == 0:
                with (folder / "losses").open("a") as file:
                    file.write(f"{json.dumps(losses[-1])}\n")
            if folder and step % every == 0:
                save_training(model, folder / f"step-{step:06}", step=step, **parts)
    return losses


def dying(name: str, write: Any = checkpoint._write) -> Any:
    """Return a `write` that kills this process in the optimizer's file of the folder `name`."""

    def end(tensors: Any, path: Path) -> None:
        write(tensors, path)
        if f".{name}." in str(path) and path.parent.name == "optimizer":
            path.write_bytes(path.read_bytes()[:1000])
            os.kill(os.getpid(), signal.SIGKILL)

    return end


if __name__ == "__main__":
    from mpi4py import MPI

    axes, (steps, every, killed) = json.loads(sys.argv[2]), map(int, sys.argv[3:])
    checkpoint._write = dying(f"step-{killed:06}")
    trained(MPI.COMM_WORLD, axes, steps, Path(sys.argv[1]), every=every)
