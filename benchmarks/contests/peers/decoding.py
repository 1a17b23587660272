"""Time a LLaMA of 134 million parameters that continues a text: ours against transformers'.

`prefill` is a prompt of 512 tokens, `decode` eight tokens after it, one at a time. transformers
runs in one process of one or two threads, ours on one tensor rank or two of one thread each. All
take turns, and logits are compared before they are timed. Exit code as of `nox -s peers`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from benchmarks.contests.contest import Part, requirements
from benchmarks.contests.peers.contestants import distance, timed, verdict
from benchmarks.contests.peers.table import LAUNCHES, LEGEND, by_seeds, ratio, standings
from benchmarks.launching import Record
from benchmarks.machine import facts
from benchmarks.sample import Span, turn
from benchmarks.statistics import Requirement
from benchmarks.worker import Intracomm, Rank
from sp_core.llama import Decoder, Grid, Llama, LlamaConfig
from sp_core.mesh import Mesh
from sp_core.nn.gradients import Placement

SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
PROMPT, TOKENS, ROUNDS = 512, 8, 6
THEIRS, OURS = ("transformers/1 thread", "transformers/2 threads"), ("ours/1 rank", "ours/2 ranks")
REQUIRED = (
    ("decode", THEIRS[0], OURS[0], 1.0),
    ("decode", THEIRS[1], OURS[1], 1.0),
    ("decode", *OURS, 1.6),
    ("prefill", *OURS, 1.8),
)
Step = Callable[[list[int]], Tensor]
"""Appends tokens to a sequence, and returns the logits (1, V) after the last of them."""


def theirs(model: Any) -> Step:
    """Begin a sequence with transformers."""
    cache: Any = importlib.import_module("transformers").DynamicCache()

    @torch.no_grad()
    def step(tokens: list[int]) -> Tensor:
        how = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        logits: Tensor = model(torch.tensor([tokens]), **how).logits[0]
        return logits

    return step


def ours(model: Llama, room: int) -> Step:
    """Begin a sequence with `Decoder`."""
    decoder = Decoder(model, [room])
    return lambda tokens: (decoder.decode if len(tokens) == 1 else decoder.prefill)([tokens])


def part(weights: dict[str, Tensor], rank: int, name: str, placement: Placement) -> Tensor:
    """Return a rank's part of a weight."""
    return placement.take(weights[name], rank)


def timers(
    world: Intracomm,
    begin: Callable[[], Step],
    prompt: list[int],
    want: list[Tensor],
    **how: Any,
) -> Iterator[tuple[str, Record, Callable[[], Span]]]:
    """Yield for each kind of work its name, the check against `want`, and how to time it.

    Args:
        world: the ranks.
        begin: begins a sequence.
        prompt: its first tokens.
        want: logits after them and after a token; the first contestant appends its own.
        how: who takes part, as `turn` has it.
    """
    steps, found = list[Step](), list[Tensor]()

    def begun() -> None:
        steps[:] = [begin()]
        found[:] = [steps[0](prompt)]

    def decoded() -> None:
        for token in range(TOKENS):
            found[:] = [steps[0]([token])]

    for name, act in (("prefill", begun), ("decode", decoded)):
        turn(world, act, **how)
        if len(want) < 2 and world.rank == 0:
            want += found
        errors = [*map(distance, found, want[name == "decode" :])] or [0.0]
        check = verdict(world.allgather(("", errors)), ("logits",))
        yield name, check, functools.partial(turn, world, act, **how)


def measure(setting: Record, rank: Rank) -> Record:
    """Carry out one launch."""
    from mpi4py import MPI

    world, prompt = rank.world, [n % 1000 for n in range(setting["seq"])]
    library: Any = importlib.import_module("transformers")
    torch.manual_seed(setting["seed"])
    given = library.LlamaConfig(**SIZES, attn_implementation="sdpa")
    model = library.LlamaForCausalLM(given).eval()
    weights = model.state_dict()
    room = len(prompt) + (ROUNDS + 2) * TOKENS
    with ExitStack() as stack:
        contestants: dict[str, tuple[Callable[[], Step], Record]] = {
            name: (functools.partial(theirs, model), {"alone": True, "threads": threads})
            for threads, name in enumerate(THEIRS, 1)
        }
        for name, comm in zip(OURS, (MPI.COMM_SELF, world), strict=True):
            mesh = stack.enter_context(Mesh(comm, check="off", tp=comm.size))
            own = Llama(LlamaConfig(**SIZES), Grid.of(mesh))
            own.fill(functools.partial(part, weights, mesh.rank))
            contestants[name] = functools.partial(ours, own, room), {"alone": comm.size == 1}
        want = list[Tensor]()
        heats: dict[str, Any] = {"decode": {}, "prefill": {}}
        for name, (begin, how) in contestants.items():
            for heat, check, sample in timers(world, begin, prompt, want, **how):
                heats[heat][name] = check, sample
        seqs = {
            heat: timed(world, checked, ROUNDS, setting["seed"]) for heat, checked in heats.items()
        }
    return {**facts(world, torch.device("cpu"), "all"), "seqs": seqs}


def show(document: Record) -> Iterator[Part]:
    """Yield a table for each kind of work, and the requirements."""
    launches = document["launches"]
    for heat in ("decode", "prefill"):
        yield from standings(launches, heat, OURS[0])
    required = [
        Requirement(f"{heat}: {slow} / {quick}", ">=", bound, found, LAUNCHES)
        for heat, slow, quick, bound in REQUIRED
        for found in [ratio(launches, heat, slow, quick)]
    ]
    yield requirements("required", required, LEGEND.partition(" Times:")[0])


HERE = "benchmarks.contests.peers.decoding:measure"
decoding = by_seeds("peers_decoding", __doc__, HERE, show, PROMPT, 1, timeout=900.0)
