"""Give tokens to ranks as you like: a sharding from lists of positions, with a window and a ring.

Run it with `sp-core run -n 4 -- python examples/layout.py`.
"""

import torch
from mpi4py import MPI
from torch import Tensor

import sp_core as sp

SEQ_LEN = 200


def main(world: MPI.Intracomm) -> Tensor:
    """Return the whole result in the order of the sequence, (1, S, H, D), on every rank."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, SEQ_LEN, 4, 16, generator=random) for _ in range(3))
    mask = sp.Mask(causal=True, window=50)  # a token sees itself and the 49 before it

    # Ranks get blocks of 20 tokens in turn. Any lists will do if each position occurs once.
    blocks = torch.arange(SEQ_LEN).split(20)
    owned = [
        torch.cat(blocks[rank :: world.size] or (torch.arange(0),)) for rank in range(world.size)
    ]
    sharding = sp.Sharding.from_positions([positions.tolist() for positions in owned])

    with sp.Mesh(world, sp=world.size) as mesh:
        comm = mesh["sp"]
        shards = (sharding.shard(x, comm.rank, dim=1) for x in (q, k, v))
        out = sp.ring_attention(*shards, comm=comm, sharding=sharding, mask=mask)
        gathered = sp.all_gather(out, comm=comm, dim=1, sizes=sharding.lengths)
        whole = sharding.unshard(gathered.split(sharding.lengths, dim=1), dim=1)
        torch.testing.assert_close(whole, sp.local_attention(q, k, v, mask=mask))
        if world.rank == 0:
            print(f"tokens of each rank: {sharding.lengths}")
    return whole


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
