"""Train on one long sequence in a window, and print the peak memory of a step beside its formula.

Run with `sp-core run -n 2 -- python examples/long_sequence.py 131072`.
"""

import sys
from functools import partial

import torch
from mpi4py import MPI

import sp_core as sp
from sp_core import llama
from sp_core.llama.train import train_step
from sp_core.testing import LiveBytes

CONFIG = llama.LlamaConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=131_072,  # more tokens can be trained, but not generated
)


def peak_bytes(config: llama.LlamaConfig, weights: int, tokens: int, ranks: int) -> int:
    """Return the bytes that a step in float32, and its sum of gradients, need at most on a rank."""
    embed, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    both, layers = (heads + config.num_key_value_heads) * dim, config.num_hidden_layers
    each, local = dim + heads + 2 * max(embed + 2 * both, 4 * embed + both), 4 * tokens // ranks
    last, first = layers * embed * local + weights // layers, embed * local + weights
    return max(weights + max(last, first) + each * local + 8 * tokens, 4 * weights + 12 * tokens)


def measured(world: MPI.Intracomm, tokens: int) -> tuple[float, int, int]:
    """Return a step's loss, its greatest peak bytes on any rank, and the formula's peak bytes."""
    sequence = [(3 * n * n + n) % CONFIG.vocab_size for n in range(tokens)]
    step = partial(train_step, max_norm=1.0, layout=sp.Sharding.contiguous, window=64)
    with sp.Mesh(world, ring=world.size) as mesh:
        model = llama.create(CONFIG, mesh)
        optimizer, chunk = torch.optim.SGD(model.parameters()), max(16, tokens // world.size // 32)
        with LiveBytes(model.parameters()) as live:
            done = step(model, optimizer, [sequence], recompute=True, chunk=chunk)
    peak, nbytes = world.allreduce(live.peak, op=MPI.MAX), sum(x.nbytes for x in model.parameters())
    return done.loss, peak, peak_bytes(CONFIG, nbytes, tokens, world.size)


def main(world: MPI.Intracomm, tokens: int = 512) -> float:
    """Return the loss, the same for every number of ranks."""
    loss, *peaks = measured(world, tokens)
    if world.rank == 0:
        print("{:,} tokens: {:,} bytes at most; formula {:,}".format(tokens, *peaks))
    return loss


if __name__ == "__main__":
    main(MPI.COMM_WORLD, *map(int, sys.argv[1:]))
