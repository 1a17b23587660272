"""Compute while a collective is under way, and prepare a collective that runs many times.

Run it with `sp-core run -n 4 -- python examples/overlap.py`.
"""

import torch
from mpi4py import MPI
from torch import Tensor

import sp_core as sp


def main(world: MPI.Intracomm) -> Tensor:
    """Return the sum over all ranks that the last run of the plan has made."""
    random = torch.Generator().manual_seed(world.rank)  # every rank has tensors of its own
    x, weight = torch.randn(256, 64, generator=random), torch.eye(64)
    with sp.Mesh(world, dp=world.size) as mesh:
        comm = mesh["dp"]
        pending = sp.all_gather_start(x, comm=comm)  # waits for the agreement only
        local = x @ weight  # work that does not need the other ranks' rows
        gathered = pending.wait()  # (256 * P, 64), in the order of the ranks
        torch.testing.assert_close(gathered[256 * comm.rank :][:256], local)

        buckets = [torch.randn(1000, generator=random) for _ in range(3)]
        sums = [sp.all_reduce_start(bucket, comm=comm) for bucket in buckets]  # three at once
        total = sum(one.wait().sum() for one in sums)

        gradient = torch.zeros(5000)
        plan = sp.plan("all_reduce", gradient, comm=comm)  # choose, allocate and agree once
        for step in range(3):
            gradient.fill_(step + comm.rank)  # a plan reads the same tensor in every run
            result = plan.run()
        torch.testing.assert_close(
            result, torch.full_like(result, sum(2 + r for r in range(comm.size)))
        )
        if world.rank == 0:
            print(f"gathered {tuple(gathered.shape)}, three sums add up to {total:.3f}")
        return result.clone()


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
