"""Train on one long sequence: layers that keep their inputs only need a fraction of the memory.

Run it with `sp-core run -n 2 -- python examples/long_sequence.py`.
"""

import torch
from mpi4py import MPI

import sp_core as sp
from sp_core import llama
from sp_core.llama.train import backward

CONFIG = llama.LlamaConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


def main(world: MPI.Intracomm, tokens: int = 1024) -> list[float]:
    """Return the loss without and with `recompute`, the same for every number of ranks."""
    losses, kept = [], []
    with sp.Mesh(world, ring=world.size) as mesh:
        model = llama.create(CONFIG, mesh, dtype=torch.float64)
        for recompute in (False, True):
            nbytes: dict[int, int] = {}  # of the memory that the backward pass needs

            def keep(x: torch.Tensor, nbytes: dict[int, int] = nbytes) -> torch.Tensor:
                nbytes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                losses.append(backward(model, [[1, 2] * (tokens // 2)], recompute=recompute))
            kept.append(sum(nbytes.values()))
    if world.rank == 0:
        print(f"kept for the backward pass: {kept[0]:,} bytes; with recompute=True {kept[1]:,}")
    return losses


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
