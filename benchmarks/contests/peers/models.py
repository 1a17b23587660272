"""Time LLaMAs: training steps of a model of transformers, and tokens that continue a text.

`peers_model` compares `parallelize` with accelerate's context parallel and ALST, over gloo. All run
in one pair of processes. A step is forward and backward of one sequence, with the gradients of the
whole sequence at its end. Ours sends its messages over gloo as the others do, or through memory
that the ranks share (transport "window"). accelerate shards the weights too, because its context
parallel needs that. It enters torch's context parallel, which has no kernel for a CPU, so attention
calls torch's ring. ALST gets one all-reduce of its gradients, in place of DeepSpeed's engine.

`peers_decoding` compares a LLaMA of 134 million parameters with transformers. `prefill` is a prompt
of 512 tokens, `decode` eight tokens after it, one at a time. transformers runs in one process of
one or two threads, ours on one tensor rank or two of one thread each.

All contestants take turns. Losses and gradients, or logits, are compared with those of one process
before they are timed. The exit codes are those of `nox -s peers`.
"""

import copy
import functools
import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contests.contest import Part, requirements
from benchmarks.contests.peers.contestants import GLOO_SECONDS, attempt, distance, timed, verdict
from benchmarks.contests.peers.others import MISSING
from benchmarks.contests.peers.table import (
    BALANCED,
    LAUNCHES,
    LEGEND,
    PLACE,
    RANKS,
    best,
    by_seeds,
    ratio,
    standings,
)
from benchmarks.launching import Record
from benchmarks.machine import facts
from benchmarks.sample import ABSENT, Span, turn
from benchmarks.statistics import Requirement
from benchmarks.worker import Intracomm, Rank
from sp_core.llama import Decoder, Grid, Llama, LlamaConfig
from sp_core.mesh import Mesh
from sp_core.nn.gradients import Placement
from sp_core.sharding import Sharding
from tests.conformance.adapters import accelerate_context_parallel, alst_ulysses, torch_ring
from tests.conformance.gloo import Gloo

VOCAB = 512
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TRANSPORTS = ("host", "window")
OURS = {
    f"parallelize, {scheme}, {transport}": (scheme, transport)
    for scheme in ("ring", "ulysses")
    for transport in TRANSPORTS
}
PEERS = ("accelerate context parallel", "deepspeed ALST")
NAMES = ("loss", "gradients")
ROUNDS = 6
Given = Mapping[str, Tensor]
"""`input_ids`, `position_ids` and `shift_labels`, (1, S) each."""

Made = tuple[Any, Callable[[], Tensor]]
"""A model and its step. The mean of the losses that ranks return is the loss of all tokens.

After a step the gradients are those of that mean.
"""


def sample(world: Intracomm, model: Any, step: Callable[[], Tensor]) -> Span:
    """Time one step on this rank."""
    model.zero_grad()
    return turn(world, step)


def results(world: Intracomm, model: Any, step: Callable[[], Tensor]) -> list[Tensor]:
    """Run a step. Return the mean loss over the ranks, and the whole gradient of each weight."""
    losses = world.allgather(float(step().detach()))
    grads = [parameter.grad for parameter in model.parameters()]
    whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in grads]
    return [torch.tensor(statistics.fmean(losses)), *whole]


def drawn(seed: int, seq: int) -> tuple[Any, dict[str, Tensor]]:
    """Return a LLaMA with random weights and a whole sequence."""
    library: Any = importlib.import_module("transformers")
    torch.manual_seed(seed)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = library.LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=seq, attn_implementation="sdpa",
        **SIZES, **HEADS, **ends,
    )  # fmt: skip
    tokens = torch.randint(0, VOCAB, (1, seq))
    labels = F.pad(tokens, (0, 1), value=-100)[:, 1:]
    given = {"input_ids": tokens, "position_ids": torch.arange(seq)[None], "shift_labels": labels}
    return library.LlamaForCausalLM(config).train(), given


def loss_of(model: Any, given: Given, count: float) -> Tensor:
    """Return the sum of the losses of these tokens, divided by `count`."""
    how = {"labels": given["shift_labels"], "num_items_in_batch": count, "use_cache": False}
    return cast("Tensor", model(**given, **how).loss)


def ours(scheme: str, model: Any, given: Given, mesh: Mesh) -> Made:
    """Split a model with `parallelize`. Return it and its step."""
    integration = importlib.import_module("sp_core.integrations.transformers")
    parallel = integration.parallelize(model, mesh, scheme, BALANCED[scheme])
    tokens = given["input_ids"]

    def step() -> Tensor:
        loss: Tensor = parallel(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    return parallel, step


@contextmanager
def attending(attention: Callable[..., object]) -> Iterator[None]:
    """Let models of transformers call the given attention while the block runs."""
    functions: Any = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    functions["sdpa"] = attention
    try:
        yield
    finally:
        del functions["sdpa"]


def ring(module: object, *qkv: Tensor, scaling: float, **others: object) -> tuple[Tensor, None]:
    """Compute attention by torch's ring, with the arguments that transformers passes."""
    heads_last = (x.transpose(1, 2) for x in qkv[:3])
    how: Any = {"layout": "zigzag", "causal": True, "softmax_scale": scaling}
    return torch_ring.attend(*heads_last, **how), None


def accelerated(model: Any, given: Given, size: int, count: float) -> Made:
    """Prepare a model with an `Accelerator`, which averages gradients over the ranks."""
    accelerate_context_parallel.prepare(None, "")
    library, utils = (importlib.import_module(f"accelerate{name}") for name in ("", ".utils"))
    library.PartialState(cpu=True).distributed_type = utils.DistributedType.MULTI_GPU
    accelerator = library.Accelerator(
        cpu=True,
        parallelism_config=utils.ParallelismConfig(cp_size=size),
        fsdp_plugin=utils.FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))

    def step() -> Tensor:
        mine = {name: x.clone() for name, x in given.items()}  # the context cuts them in place
        buffers = list(mine.values())
        how = {"buffer_seq_dims": [1] * len(buffers), "no_restore_buffers": {*buffers}}
        with accelerator.maybe_context_parallel(buffers=buffers, **how), attending(ring):
            loss = loss_of(prepared, mine, count)
            loss.backward()
        return loss

    return prepared, step


def alst(model: Any, given: Given, size: int, count: float) -> Made:
    """Return a model and its step, in which UlyssesSPAttentionHF replaces the model's attention."""
    alst_ulysses.prepare(None, "")
    attention = alst_ulysses._registered(model.config, "sdpa", 1)
    shards = Sharding.contiguous(given["input_ids"].shape[1], size)
    mine = {name: shards.shard(x, dist.get_rank(), 1).contiguous() for name, x in given.items()}

    def step() -> Tensor:
        with attending(attention):
            loss = loss_of(model, mine, count)
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        flat = torch.cat([x.flatten() for x in grads])
        dist.all_reduce(flat)
        for x, total in zip(grads, flat.split([x.numel() for x in grads]), strict=True):
            x.copy_(total.view_as(x)).div_(size)
        return loss

    return model, step


def checked(
    make: Callable[[], Made], want: list[Tensor], world: Intracomm
) -> tuple[Record, Callable[[], Span]]:
    """Return the check of a contestant, and a function that times one step of it."""
    try:
        made = make()
    except MISSING as error:
        reason = f"{type(error).__name__}: {error}"
        return {"status": "not installed", "reason": reason}, lambda: ABSENT
    found = [0.0] * len(NAMES)

    def compare() -> None:
        loss, *grads = map(distance, results(world, *made), want)
        found[:] = loss, max(grads)

    return attempt(world, compare, found, NAMES), functools.partial(sample, world, *made)


def measure(setting: Record, rank: Rank) -> Record:
    """Run one launch of `peers_model`, and return its record."""
    world, seq, seed = rank.world, setting["seq"], setting["seed"]
    with ExitStack() as stack:
        Gloo(rank.folder, world, GLOO_SECONDS)
        stack.callback(dist.destroy_process_group)
        meshes = {
            name: stack.enter_context(
                Mesh(dist.group.WORLD, check="off", transport=name, ring=world.size)
            )
            for name in TRANSPORTS
        }
        whole, given = drawn(seed, seq)
        loss = loss_of(whole, given, seq - 1)
        loss.backward()
        want = [loss.detach(), *(x.grad.clone() for x in whole.parameters())]
        whole.zero_grad()
        others = {"size": world.size, "count": (seq - 1) / world.size}
        makers = {
            **{
                name: functools.partial(ours, scheme, mesh=meshes[transport])
                for name, (scheme, transport) in OURS.items()
            },
            PEERS[0]: functools.partial(accelerated, **others),
            PEERS[1]: functools.partial(alst, **others),
        }
        found = {
            name: checked(functools.partial(make, copy.deepcopy(whole), given), want, world)
            for name, make in makers.items()
        }
        record = timed(world, found, ROUNDS, seed)
    return {**facts(world, torch.device("cpu"), "all"), "seqs": {str(seq): record}}


def show(document: Record) -> Iterator[Part]:
    """Yield a table of the contestants and the requirements."""
    launches, seq = document["launches"], document["seq"]
    ours = best(launches, seq, OURS)
    yield from standings(launches, seq, ours)
    pairs = [(f"{peer} / {ours}", ratio(launches, seq, peer, ours)) for peer in PEERS]
    required = [Requirement(text, ">=", 1.0, found, LAUNCHES) for text, found in pairs]
    yield requirements("required", required, LEGEND)


LARGE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
PROMPT, TOKENS = 512, 8
THEIRS = ("transformers/1 thread", "transformers/2 threads")
DECODERS = ("ours/1 rank", "ours/2 ranks")
REQUIRED = (
    ("decode", THEIRS[0], DECODERS[0], 1.0),
    ("decode", THEIRS[1], DECODERS[1], 1.0),
    ("decode", *DECODERS, 1.6),
    ("prefill", *DECODERS, 1.8),
)
Step = Callable[[list[int]], Tensor]
"""Appends tokens to a sequence, and returns the logits (1, V) after the last of them."""


def theirs(model: Any) -> Step:
    """Return the step of a new sequence that transformers computes."""
    cache: Any = importlib.import_module("transformers").DynamicCache()

    @torch.no_grad()
    def step(tokens: list[int]) -> Tensor:
        how = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        return cast("Tensor", model(torch.tensor([tokens]), **how).logits[0])

    return step


def part(weights: dict[str, Tensor], rank: int, name: str, placement: Placement) -> Tensor:
    """Return a rank's part of a weight."""
    return placement.take(weights[name], rank)


def continued(model: Llama, room: int) -> Step:
    """Begin a sequence of at most `room` tokens with `Decoder`; return its function of tokens.

    The function takes the next tokens, and returns the logits after the last of them.
    """
    decoder = Decoder(model, [room])
    return lambda tokens: (decoder.decode if len(tokens) == 1 else decoder.prefill)([tokens])


def timers(
    world: Intracomm,
    begin: Callable[[], Step],
    prompt: list[int],
    want: list[Tensor],
    **how: Any,
) -> Iterator[tuple[str, Record, Callable[[], Span]]]:
    """Yield for each kind of work its name, the check against `want`, and a function to time it.

    Args:
        world: all ranks.
        begin: begins a sequence and returns its step.
        prompt: the first tokens of the sequence.
        want: the logits after prefill and after decode; the first contestant appends its own.
        how: arguments for `turn`, which say who takes part.
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


def measure_decoding(setting: Record, rank: Rank) -> Record:
    """Run one launch of `peers_decoding`, and return its record."""
    from mpi4py import MPI

    world, prompt = rank.world, [n % 1000 for n in range(setting["seq"])]
    library: Any = importlib.import_module("transformers")
    torch.manual_seed(setting["seed"])
    given = library.LlamaConfig(**LARGE, attn_implementation="sdpa")
    model = library.LlamaForCausalLM(given).eval()
    weights = model.state_dict()
    room = len(prompt) + (ROUNDS + 2) * TOKENS
    with ExitStack() as stack:
        contestants: dict[str, tuple[Callable[[], Step], Record]] = {
            name: (functools.partial(theirs, model), {"alone": True, "threads": threads})
            for threads, name in enumerate(THEIRS, 1)
        }
        for name, comm in zip(DECODERS, (MPI.COMM_SELF, world), strict=True):
            mesh = stack.enter_context(Mesh(comm, check="off", tp=comm.size))
            own = Llama(LlamaConfig(**LARGE), Grid.of(mesh)).requires_grad_(False)
            own.fill(functools.partial(part, weights, mesh.rank))
            contestants[name] = functools.partial(continued, own, room), {"alone": comm.size == 1}
        want = list[Tensor]()
        heats: dict[str, Any] = {"decode": {}, "prefill": {}}
        for name, (begin, how) in contestants.items():
            for heat, check, sample in timers(world, begin, prompt, want, **how):
                heats[heat][name] = check, sample
        seqs = {
            heat: timed(world, checked, ROUNDS, setting["seed"]) for heat, checked in heats.items()
        }
    return {**facts(world, torch.device("cpu"), "all"), "seqs": seqs}


def show_decoding(document: Record) -> Iterator[Part]:
    """Yield a table for each kind of work, and the requirements."""
    launches = document["launches"]
    for heat in ("decode", "prefill"):
        yield from standings(launches, heat, DECODERS[0])
    required = [
        Requirement(f"{heat}: {slow} / {quick}", ">=", bound, found, LAUNCHES)
        for heat, slow, quick, bound in REQUIRED
        for found in [ratio(launches, heat, slow, quick)]
    ]
    yield requirements("required", required, LEGEND.partition(" Times:")[0])


HERE = "benchmarks.contests.peers.models"
models = by_seeds(
    "peers_model", __doc__, f"{HERE}:measure", show, seq=PLACE, multiple=RANKS, timeout=1800.0
)
decoding = by_seeds(
    *("peers_decoding", __doc__, f"{HERE}:measure_decoding", show_decoding),
    seq=PROMPT,
    multiple=1,
    timeout=900.0,
)
