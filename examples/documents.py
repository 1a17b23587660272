"""Pack documents of different lengths into one sequence, split it over ranks, and compute the loss.

Run it with `sp-core run -n 4 -- python examples/documents.py`.
"""

from itertools import accumulate

import torch
from mpi4py import MPI

import sp_core as sp
from sp_core.nn.loss import next_token_labels, next_token_loss

LENGTHS, VOCABULARY = (300, 17, 1, 120, 42), 50


def main(world: MPI.Intracomm) -> float:
    """Return the loss, which is the same for every number of ranks."""
    boundaries = (0, *accumulate(LENGTHS))  # cu_seqlens: 0, 300, 317, ...
    seq_len = boundaries[-1]
    mask = sp.Mask(causal=True, documents=boundaries)  # no token sees another document
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (1, seq_len), generator=random)
    embedding = torch.randn(VOCABULARY, 64, generator=random)

    with sp.Mesh(world, sp=world.size, tp=1) as mesh:
        comm = mesh["sp"]
        sharding = sp.Sharding.striped(seq_len=seq_len, size=comm.size)
        mine = sharding.shard(tokens, comm.rank, dim=1)
        x = embedding[mine].unflatten(2, (4, 16))  # 4 heads of 16
        out = sp.ring_attention(x, x, x, comm=comm, sharding=sharding, mask=mask)
        logits = out.flatten(2) @ embedding.T
        # The last token of a document has no label. The next token may be on another rank.
        labels = next_token_labels(mine, comm=comm, sharding=sharding, mask=mask)
        loss = next_token_loss(logits, labels, tensor=mesh["tp"], data=comm).item()
        if world.rank == 0:
            print(
                f"{len(LENGTHS)} documents, {seq_len} tokens on {comm.size} ranks: loss {loss:.4f}"
            )
    return loss


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
