"""Train a small LLaMA over tensor and sequence ranks, save it, and load it on another mesh.

Run it with `sp-core run -n 4 -- python examples/train.py`.
"""

import tempfile
from pathlib import Path

import torch
from mpi4py import MPI

import sp_core as sp
from sp_core import llama
from sp_core.llama.train import train_step

CONFIG = llama.LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
TEXT = b"to be or not to be, that is the question; " * 3


def main(world: MPI.Intracomm, steps: int = 8) -> list[float]:
    """Return the loss of each step, the same for every number of ranks."""
    sequences = [list(TEXT[:70]), list(TEXT[5:40])]  # packed into one row, never padded
    tp = 2 if world.size % 2 == 0 else 1
    made = tempfile.TemporaryDirectory() if world.rank == 0 else None
    folder = Path(world.bcast(made.name if made else None)) / "model"  # every rank uses this path
    with sp.Mesh(world, ring=world.size // tp, tp=tp) as mesh:
        model = llama.create(CONFIG, mesh, dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = [train_step(model, optimizer, sequences, max_norm=1.0).loss for _ in range(steps)]
        llama.save(model, folder)  # a Hugging Face folder
    with sp.Mesh(world, ring=world.size) as mesh:  # other axes than before
        model = llama.load(folder, mesh)
        new = llama.generate(model, [list(b"to be or")], max_tokens=8)
    if made:
        made.cleanup()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; 'to be or' goes on {bytes(new[0])!r}")
    return losses


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
