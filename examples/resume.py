"""Stop a training on one mesh, and resume it on another. A step adds up two micro-batches.

Run it with `sp-core run -n 4 -- python examples/resume.py`.
"""

import tempfile
from pathlib import Path

import torch
from mpi4py import MPI

import sp_core as sp
from sp_core.llama.pipeline import MicroBatch, loss_and_gradients
from sp_core.llama.train import load_training, save_training
from sp_core.nn.gradients import reduce_gradients
from sp_core.nn.loss import next_token_labels

CONFIG = sp.llama.LlamaConfig(64, 32, 64, 1, 4, 4, 8)  # sizes as in the configuration of a folder


def micro_batch(model: sp.llama.Llama, tokens: torch.Tensor) -> MicroBatch:
    """Return this rank's part of sequences (B, S), which are those of this rank's replica."""
    comm, sharding = model.grid.sequence, sp.Sharding.zigzag(24, model.grid.sequence.size)
    shard = sharding.shard(tokens, comm.rank, 1)
    return MicroBatch(shard, next_token_labels(shard, comm=comm, sharding=sharding), sharding)


def train(mesh: sp.Mesh, folder: Path, steps: int) -> list[float]:
    """Train from the last checkpoint in `folder` up to step `steps`, and save a new one."""
    model = sp.llama.create(CONFIG, mesh, dtype=torch.float64)
    grid, weights, losses = model.grid, list(model.parameters()), []
    opt = torch.optim.AdamW(weights, lr=1e-2)
    rng, saved = torch.Generator().manual_seed(0), sorted(folder.glob("step-*"))
    start = load_training(model, saved[-1], optimizer=opt, generator=rng) if saved else 0
    for _ in range(start, steps):
        drawn = torch.randint(0, 64, (2, 1, 1), generator=rng) + torch.arange(24)
        opt.zero_grad()
        losses += [float(loss_and_gradients(model, [micro_batch(model, x % 64) for x in drawn]))]
        reduce_gradients(weights, data=grid.data, tensor=grid.tensor)
        opt.step()
    if start < steps:  # else this job has run before, up to its end
        save_training(model, folder / f"step-{steps:06}", optimizer=opt, step=steps, generator=rng)
    return losses


def main(world: MPI.Intracomm) -> list[float]:
    """Return the losses of both parts, the same for 1 to 4 ranks, which split the 4 heads."""
    made = tempfile.TemporaryDirectory() if world.rank == 0 else None
    folder, losses = Path(world.bcast(made.name if made else None)), []  # on all ranks
    for steps, axes in ((4, {"tp": world.size}), (8, {"ulysses": world.size})):
        with sp.Mesh(world, **axes) as mesh:
            losses += train(mesh, folder, steps)
    if made:
        made.cleanup()
        print(*losses)
    return losses


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
