"""Put ring attention into a model of your own, and train it as if it ran on one device.

Run it with `sp-core run -n 4 -- python examples/own_model.py`.
"""

import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

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
        positions = self.sharding.positions(self.comm.rank)  # in the whole sequence
        q, k = (self.rope.apply(y, positions) for y in (q, k))
        y = sp.ring_attention(q, k, v, comm=self.comm, sharding=self.sharding, mask=CAUSAL)
        return (x + y.flatten(2)) @ self.embedding.weight.T


def main(world: MPI.Intracomm, steps: int = 10) -> list[float]:
    """Return the loss of each step, the same on any number of ranks."""
    with sp.Mesh(world, sp=world.size) as mesh:
        comm, sharding = mesh["sp"], sp.Sharding.zigzag(seq_len=SEQ_LEN, size=world.size)
        model, random = Model(comm, sharding), torch.Generator().manual_seed(0)
        for weight in model.parameters():  # the same weights on every rank
            nn.init.normal_(weight, std=0.2, generator=random)
        tokens = torch.arange(SEQ_LEN + 1).remainder(7).unsqueeze(0)
        mine, labels = (sharding.shard(x, comm.rank, 1) for x in (tokens[:, :-1], tokens[:, 1:]))
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3), []
        for _ in range(steps):
            optimizer.zero_grad()
            own = cross_entropy(model(mine).mT, labels, reduction="sum") / SEQ_LEN
            loss = sp.reduce_from_group(own, comm=comm)  # the mean over all tokens
            loss.backward()
            for weight in model.parameters():  # each rank has the gradient of its own tokens
                weight.grad = sp.all_reduce(weight.grad, comm=comm)
            optimizer.step()
            losses.append(loss.item())
    if world.rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {world.size} ranks")
    return losses


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
