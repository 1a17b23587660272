"""Time one token and a prompt of a small LLaMA over tensor ranks, with every all-reduce algorithm.

The ratio of a case's times on two numbers of ranks is the gain of tensor parallelism. The ratio of
two algorithms on the same ranks is the effect of the algorithm.
"""

from collections.abc import Callable

from torch import Tensor

from benchmarks.cases.case import Phases, Work, dtype_of
from benchmarks.records import Case, make_case
from sp_core.llama import Decoder, Llama, LlamaConfig, create
from sp_core.mesh import Mesh
from sp_core.programs import ALGORITHMS
from sp_core.sharding import split_sizes
from sp_core.transport import NAMES

SHAPE = {
    "layers": 4,
    "seq": 256,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 32,
    "ffn": 704,
    "vocab": 1024,
}
LIBRARY = "mpi"  # the algorithm whose bytes have a formula here
WINDOW = "window"  # a transport, and the algorithm that needs it
PREFILL, DECODE, TP_SP = "prefill", "decode", "tp_sp"
TOKEN = 1


def cases(ranks: int, device: str = "cpu", shape: dict[str, int] = SHAPE) -> list[Case]:
    """Return all cases for a number of ranks and a kind of device."""
    offered = [
        name
        for name in ALGORITHMS["all_reduce"]
        if name != "auto" and (name != WINDOW or WINDOW in NAMES[device])
    ]
    decoding, prompts = ([(scheme, name, None) for name in offered] for scheme in (DECODE, PREFILL))
    return [
        make_case(
            *("llama", scheme, {"tp": ranks}, shape),
            WINDOW if algorithm == WINDOW else NAMES[device][0],
            algorithm=algorithm,
            detail=detail,
        )
        for scheme, algorithm, detail in (*decoding, *prompts, (PREFILL, LIBRARY, TP_SP))
    ]


def quick(case: Case) -> bool:
    """Return whether a case is part of the small selection."""
    return case.algorithm == LIBRARY and not case.id.endswith(f"/{TP_SP}")


def build(case: Case, mesh: Mesh, sync: Callable[[], None]) -> Work:
    """Return this rank's work: a step of its part of a model, with the keys that it has cached."""
    shape = case.shape
    config = LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
    )
    model = create(config, mesh, dtype=dtype_of(case), tp_sp=case.id.endswith(f"/{TP_SP}"))
    model.requires_grad_(False)
    step, held = (_decode if case.scheme == DECODE else _prefill)(model, shape["seq"])
    return Work(
        step,
        Phases([mesh["tp"]], sync),
        [*model.parameters(), *held],
        sent=_sent(case, mesh["tp"].rank) if case.algorithm == LIBRARY else None,
        tokens=_tokens(case),
    )


Made = tuple[Callable[[], object], list[Tensor]]
"""The step, and the tensors besides the weights that are alive when it begins."""


def _prefill(model: Llama, seq: int) -> Made:
    """Return a step that reads a prompt into a new cache and computes the logits after it."""
    return lambda: Decoder(model, [seq]).prefill([[TOKEN] * seq]), []


def _decode(model: Llama, seq: int) -> Made:
    """Return a step that decodes one token after a prompt, then drops it: all steps are equal."""
    decoder = Decoder(model, [seq + 1])
    decoder.prefill([[TOKEN] * seq])
    (cache,) = decoder.caches
    before = [len(owned) for owned in cache.owned]

    def step() -> None:
        decoder.decode([[TOKEN]])
        cache.lengths = [seq]
        for owned, length in zip(cache.owned, before, strict=True):
            del owned[length:]

    return step, [cache.rows]


def _tokens(case: Case) -> int:
    return 1 if case.scheme == DECODE else case.shape["seq"]


def _sent(case: Case, rank: int) -> int:
    """Return the bytes that this rank gives to the MPI library for others.

    The model sums over the ranks after the embedding and twice in each layer, then gathers logits.
    """
    ranks, hidden, itemsize = case.ranks, case.shape["hidden"], dtype_of(case).itemsize
    if ranks == 1:
        return 0
    sums, tokens = 1 + 2 * case.shape["layers"], _tokens(case)
    logits = (ranks - 1) * split_sizes(case.shape["vocab"], ranks)[rank] * itemsize
    if not case.id.endswith(f"/{TP_SP}"):
        return sums * tokens * hidden * itemsize + logits
    own = split_sizes(tokens, ranks)[rank]
    scattered, gathered = sums * (tokens - own), (sums - 1) * (ranks - 1) * own
    last = (ranks - 1) * (rank == ranks - 1)
    return (scattered + gathered + last) * hidden * itemsize + logits
