"""Time a LLaMA of 134 million parameters that continues a text: ours against transformers'.

`prefill` is a prompt of 512 tokens, `decode` eight tokens after it, one at a time. transformers
runs in one process of one or two threads, ours on one tensor rank or two of one thread each. All
take turns, and logits are compared before they are timed. Exit code as of `nox -s peers`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.contests.contest import Contest, Entry, Part, requirements
from benchmarks.contests.peers.__main__ import LAUNCHES, LEGEND, RANKS, ratio, refuse, standings
from benchmarks.contests.peers.contestants import timed, verdict
from benchmarks.launching import Launch, Record, about, main
from benchmarks.machine import facts
from benchmarks.sample import ABSENT, Span, meet_asleep
from benchmarks.statistics import Requirement
from benchmarks.worker import THREADS, Intracomm, Rank
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


@dataclass(frozen=True)
class Contestant:
    """One way to continue a text.

    Args:
        begin: begins a sequence.
        prompt: its first tokens.
        world: the ranks; those that take no part sleep.
        threads: of each rank.
        ranks: 1 if rank 0 alone takes part, else all.
    """

    begin: Callable[[], Step]
    prompt: list[int]
    world: Intracomm
    threads: int = THREADS
    ranks: int = 1

    def turn(self, act: Callable[[], object]) -> Span:
        """Time `act` on the ranks that take part."""
        torch.set_num_threads(self.threads)
        try:
            if self.ranks == 1 and self.world.rank:
                return ABSENT
            if self.ranks > 1:
                self.world.Barrier()
            start = time.perf_counter()
            act()
            return start, time.perf_counter()
        finally:
            torch.set_num_threads(THREADS)
            if self.ranks == 1:
                meet_asleep(self.world)

    def timers(self, want: list[Tensor]) -> Iterator[tuple[str, Record, Callable[[], Span]]]:
        """Yield for each kind of work its name, the check against `want`, and how to time it.

        The first contestant appends its logits to `want`.
        """
        steps, found = list[Step](), list[Tensor]()

        def begun() -> None:
            steps[:] = [self.begin()]
            found[:] = [steps[0](self.prompt)]

        def decoded() -> None:
            for token in range(TOKENS):
                found[:] = [steps[0]([token])]

        for name, act in (("prefill", begun), ("decode", decoded)):
            self.turn(act)
            if len(want) < 2 and self.world.rank == 0:
                want += found
            pairs = zip(found, want[name == "decode" :], strict=False)
            errors = [float((x - y).abs().max() / y.abs().max()) for x, y in pairs]
            answers = self.world.allgather(("", errors or [0.0]))
            yield name, verdict(answers, ("logits",)), functools.partial(self.turn, act)


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
        found = {
            name: Contestant(functools.partial(theirs, model), prompt, world, threads)
            for threads, name in enumerate(THEIRS, 1)
        }
        for name, comm in zip(OURS, (MPI.COMM_SELF, world), strict=True):
            mesh = stack.enter_context(Mesh(comm, check="off", tp=comm.size))
            own = Llama(LlamaConfig(**SIZES), Grid.of(mesh))
            own.fill(functools.partial(part, weights, mesh.rank))
            begin = functools.partial(ours, own, room)
            found[name] = Contestant(begin, prompt, world, ranks=comm.size)
        want = list[Tensor]()
        heats: dict[str, Any] = {"decode": {}, "prefill": {}}
        for name, contestant in found.items():
            for heat, check, sample in contestant.timers(want):
                heats[heat][name] = check, sample
        seqs = {
            heat: timed(world, checked, ROUNDS, setting["seed"]) for heat, checked in heats.items()
        }
    return {**facts(world, torch.device("cpu"), "all"), "seqs": seqs}


def plan(options: argparse.Namespace) -> tuple[Record, list[Entry]]:
    """Return the launches, one for each seed.

    Raises:
        UsageError: an odd prompt, or no launch.
    """
    refuse(options, [options.seq], [1])
    launch, here = Launch(timeout=options.timeout), "benchmarks.contests.peers.decoding:measure"
    settings = [{"seq": options.seq, "seed": seed} for seed in range(options.launches)]
    return {"seq": options.seq}, [
        Entry(f"seed {setting['seed']}", RANKS, here, setting, launch) for setting in settings
    ]


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


OPTIONS = {
    "--launches": about(
        type=int, default=LAUNCHES, metavar="N", help="how often processes start (%(default)s)"
    ),
    "--seq": about(
        type=int, default=PROMPT, metavar="S", help="tokens of the prompt (default: %(default)s)"
    ),
}
decoding = Contest("peers_decoding", __doc__, OPTIONS, plan, show, "peers_decoding.json", 900.0)

if __name__ == "__main__":
    main(decoding)
