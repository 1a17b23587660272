"""Assign many sequences of unequal length to ranks, then compute them with a LLaMA.

Run it with `sp-core run -n 4 -- python examples/unequal.py`.
"""

import torch
from mpi4py import MPI
from torch import Tensor

import sp_core as sp
from sp_core import llama, scheduling
from sp_core.llama.unequal import work_of

CONFIG = llama.LlamaConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
LENGTHS = (400, 30, 22, 150, 8, 90, 61, 12)


def main(world: MPI.Intracomm) -> Tensor:
    """Return the logits after the last token of each sequence, (N, V), the same on every rank."""
    random = torch.Generator().manual_seed(0)
    sequences = [torch.randint(100, (length,), generator=random).tolist() for length in LENGTHS]
    work = work_of(CONFIG)  # floating-point operations
    plan = scheduling.balanced(LENGTHS, world.size, work)  # long ones shared, short ones dealt out
    with sp.Mesh(world, ring=world.size) as mesh:
        model = llama.create(CONFIG, mesh, dtype=torch.float64)
        logits = llama.prefill_unequal(model, sequences, plan)
    if world.rank == 0:
        loads = plan.loads(work)
        print(f"shared: {[LENGTHS[number] for number in plan.sharded]}")
        for rank, numbers in enumerate(plan.packed):
            print(f"rank {rank}: {[LENGTHS[number] for number in numbers]}")
        print(f"largest load / mean load: {max(loads) * len(loads) / sum(loads):.3f}")
    return logits


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
