"""Run every attention scheme on the same tensors, compare the results, and count the bytes sent.

Run it with `sp-core run -n 4 -- python examples/schemes.py`.
"""

from functools import partial

import torch
from mpi4py import MPI

import sp_core as sp


def main(world: MPI.Intracomm) -> dict[str, float]:
    """Return the bytes that this rank sends in each scheme, forward and backward."""
    random = torch.Generator().manual_seed(0)  # every rank draws the same tensors
    shapes = [(1, 512, heads, 32) for heads in (8, 2, 2)]
    whole = [torch.randn(shape, generator=random) for shape in shapes]  # (batch, tokens, heads, D)
    mask = sp.Mask(causal=True)
    expected = sp.local_attention(*whole, mask=mask)

    inner = 2 if world.size % 2 == 0 else 1
    sent = {}
    with sp.Mesh(world, ring=world.size // inner, ulysses=inner) as mesh:
        tokens = mesh["ring", "ulysses"]  # the product of both axes: all ranks
        schemes = {
            "allgather_kv": sp.allgather_kv_attention,
            "ring": sp.ring_attention,
            "ulysses": sp.ulysses_attention,
            "hybrid": partial(sp.hybrid_attention, mesh=mesh),
        }
        sharding = sp.Sharding.zigzag(seq_len=512, size=tokens.size)
        for name, attention in schemes.items():
            before = total(mesh)
            q, k, v = (sharding.shard(x, tokens.rank, dim=1).requires_grad_() for x in whole)
            out = attention(q, k, v, comm=tokens, sharding=sharding, mask=mask)
            out.sum().backward()
            sent[name] = total(mesh) - before
            mine = sharding.shard(expected, tokens.rank, dim=1)
            torch.testing.assert_close(out, mine)
            if world.rank == 0:
                print(f"{name}: rank 0 sent {sent[name] / 1e3:.0f} kB")
    return sent


def total(mesh: sp.Mesh) -> int:
    """Return the bytes that this rank has sent so far, over all communicators of the mesh."""
    comms = [mesh["ring"], mesh["ulysses"], mesh["ring", "ulysses"]]
    return sum(comm.counters.total().bytes_sent for comm in comms)


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
