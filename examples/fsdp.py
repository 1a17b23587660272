"""Train a model under FSDP2 and ring attention on the processes of torchrun, without MPI.

Run it with `torchrun --nproc-per-node 4 examples/fsdp.py`.
"""

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

import sp_core as sp

VOCABULARY, HIDDEN, HEADS, SEQ_LEN, CAUSAL = 16, 32, 4, 96, sp.Mask(causal=True)


class Model(nn.Module):
    """One causal attention layer between an embedding and a head."""

    def __init__(self, comm: sp.Communicator, sharding: sp.Sharding) -> None:
        super().__init__()
        self.comm, self.sharding, self.rope = comm, sharding, sp.Rope(HIDDEN // HEADS)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map this rank's tokens (B, S/P) to logits (B, S/P, V)."""
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).unbind(2)
        q, k = (self.rope.apply(y, self.sharding.positions(self.comm.rank)) for y in (q, k))
        y = sp.ring_attention(q, k, v, comm=self.comm, sharding=self.sharding, mask=CAUSAL)
        return (x + y.flatten(2)) @ self.embedding.weight.T


def main(steps: int = 10) -> list[float]:
    """Return the loss of each step, the same on any number of ranks."""
    torch.manual_seed(0)  # the same weights and rows on every rank
    size = distributed.get_world_size()
    dp = 2 - size % 2
    with sp.Mesh(None, dp=dp, ring=size // dp) as mesh:  # None: all processes of the group
        comm, sharding = mesh["ring"], sp.Sharding.zigzag(seq_len=SEQ_LEN, size=size // dp)
        model = Model(comm, sharding)
        fully_shard(model, mesh=mesh.to_device_mesh())  # copies along dp, shards along the ring
        rows = torch.arange(2 * SEQ_LEN + 2).remainder(7).view(2, -1).chunk(dp)[mesh["dp"].rank]
        mine, labels = (sharding.shard(x, comm.rank, 1) for x in (rows[:, :-1], rows[:, 1:]))
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3), []
        for _ in range(steps):
            own = nn.functional.cross_entropy(model(mine).mT, labels, reduction="sum") / (
                2 * SEQ_LEN
            )
            (own * size).backward()  # FSDP averages over all ranks; a sum is needed
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sp.all_reduce(own.detach(), comm=mesh["dp", "ring"]).item())
    print(f"rank {mesh.rank} of {size}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    main()
    distributed.destroy_process_group()
