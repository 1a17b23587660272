"""Split the two linear layers of a feed-forward network over ranks, as Megatron does.

Run it with `sp-core run -n 4 -- python examples/tensor_parallel.py`.
"""

import torch
from mpi4py import MPI
from torch import Tensor, nn

import sp_core as sp


def main(world: MPI.Intracomm) -> Tensor:
    """Return this rank's rows of the result, (1, S/P, 48)."""
    torch.set_default_dtype(torch.float32)
    random = torch.Generator().manual_seed(0)
    up, down = nn.Linear(48, 192), nn.Linear(192, 48)
    with torch.no_grad():
        for weight in (*up.parameters(), *down.parameters()):
            weight.copy_(0.1 * torch.randn(weight.shape, generator=random))
    x = torch.randn(1, 101, 48, generator=random)  # 101 tokens: shards may have unequal lengths

    with sp.Mesh(world, tp=world.size) as mesh:
        comm = mesh["tp"]
        sharding = sp.Sharding.contiguous(seq_len=101, size=comm.size)
        # With a sharding, tokens are split outside the pair: all-gather, then reduce-scatter.
        first = sp.ColumnParallelLinear.from_linear(up, comm=comm, sharding=sharding)
        second = sp.RowParallelLinear.from_linear(down, comm=comm, sharding=sharding)
        mine = sharding.shard(x, comm.rank, dim=1)
        y = second(torch.relu(first(mine)))
        expected = sharding.shard(down(torch.relu(up(x))), comm.rank, dim=1)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(second.to_linear().weight, down.weight)  # gathered again
        if world.rank == 0:
            held = sum(weight.numel() for weight in first.parameters())
            print(
                f"rank 0 of {comm.size} holds {held} of {48 * 192 + 192} weights of the first layer"
            )
    return y.detach()


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
