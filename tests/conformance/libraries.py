"""List the libraries on trial: their problems, what they offer, and what they document."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any

from conformance import attention, flash_standin, layers
from conformance.adapters.yunchang_usp import degrees
from conformance.attention import Needs, Positions

SUBJECTS: dict[str, ModuleType] = {"attention": attention, "layers": layers}
REFUSED, NOT_OFFERED = "refused", "not offered"


@dataclass(frozen=True)
class Says:
    """Why a capability is not tried.

    Args:
        verdict: REFUSED where the documentation says that it is not supported, NOT_OFFERED where
            the call has no place for it.
        text: what it says, or what is missing.
        source: where.
    """

    verdict: str
    text: str
    source: str


@dataclass(frozen=True)
class Library:
    """One column of the report.

    Args:
        name: of the column.
        adapter: module of `conformance.adapters`.
        package: distribution whose version is told; with spaces between several.
        variant: for the adapter.
        needs: how it wants its problems.
        says: capabilities that are not tried, with the reason.
        known: where a fault of a capability has been told to its project.
        flash: whether it is given the stand-in for flash-attn.
        full: whether it can do without a mask.
        patience: seconds that its ranks wait for each other before they count as hung.
        about: name of its subject.
    """

    name: str
    adapter: str
    package: str
    variant: str = ""
    needs: Needs = field(default_factory=Needs)
    says: Mapping[str, Says] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)
    flash: bool = False
    full: bool = True
    patience: float = 5.0
    about: str = "attention"

    @property
    def subject(self) -> ModuleType:
        """Return what is on trial."""
        return SUBJECTS[self.about]

    def module(self) -> ModuleType:
        """The adapter; the library itself is imported when it is first called.

        Raises:
            ImportError: it is not there.
        """
        if self.flash:
            flash_standin.install()
        return importlib.import_module(f"conformance.adapters.{self.adapter}")

    def tried(self) -> list[str]:
        """Capabilities that are put to it."""
        return [name for name in self.subject.CAPABILITIES if name not in self.excluded()]

    def excluded(self) -> dict[str, Says]:
        """Return the capabilities that are not tried, such as missing layouts, with the reason."""
        layouts = {"contiguous", "zigzag", "striped"} & set(self.subject.CAPABILITIES)
        missing = {
            name: Says(NOT_OFFERED, "another layout", "")
            for name in sorted(layouts - set(self.needs.layouts))
        }
        return {**missing, **self.says}


def _per_document(half: bool) -> Any:
    """Give every rank a piece, or two, of each document, as varlen functions want it."""

    def places(
        layout: str, seq_len: int, size: int, documents: tuple[int, ...] | None
    ) -> Positions:
        shards: list[list[int]] = [[] for _ in range(size)]
        cuts = documents or (0, seq_len)
        for start, end in pairwise(cuts):
            pieces = 2 * size if half else size
            each = (end - start) // pieces
            for rank, shard in enumerate(shards):
                for piece in (rank, 2 * size - 1 - rank) if half else (rank,):
                    shard.extend(range(start + piece * each, start + (piece + 1) * each))
        return tuple(map(tuple, shards))

    return places


def _yunchang_zigzag(
    layout: str, seq_len: int, size: int, documents: tuple[int, ...] | None
) -> Positions:
    """Give the r-th rank of a ring of R pieces r and 2R-1-r; its Ulysses group shares them."""
    ulysses, ring = degrees(size)
    each = seq_len // (2 * ring)
    shards = []
    for rank in range(size):
        pieces = (rank // ulysses, 2 * ring - 1 - rank // ulysses)
        held = [token for piece in pieces for token in range(piece * each, (piece + 1) * each)]
        share = len(held) // ulysses
        shards.append(tuple(held[rank % ulysses * share : (rank % ulysses + 1) * share]))
    return tuple(shards)


RING_FLASH = "github.com/zhuzilin/ring-flash-attention"
YUNCHANG = "github.com/feifeibear/long-context-attention"
CONTEXT_PARALLEL = "torch/distributed/tensor/experimental/_context_parallel"

FLASH_DTYPES = Says(
    REFUSED,
    "Datatype fp16 and bf16",
    "github.com/Dao-AILab/flash-attention, README.md: of the kernels that it calls",
)
CAUSAL_ONLY = Says(
    REFUSED,
    "zigzag ring is meaningless for causal=False",
    f"{RING_FLASH}, zigzag_ring_flash_attn.py: an assertion",
)
NO_WINDOW = Says(
    REFUSED, "window_size is not supported", f"{RING_FLASH}, README.md: Known Limitations"
)

BATCH = {
    "window": NO_WINDOW,
    "documents": Says(
        NOT_OFFERED,
        "no argument for boundaries",
        f"{RING_FLASH}, README.md: its varlen functions have one",
    ),
    "float64": FLASH_DTYPES,
}
RING = {
    **BATCH,
    "uneven length": Says(
        REFUSED,
        "assert seqlen % world_size == 0",
        f"{RING_FLASH}, test/test_ring_flash_attn_func.py",
    ),
}
ZIGZAG = {
    **BATCH,
    "full": CAUSAL_ONLY,
    "uneven length": Says(
        REFUSED,
        "assert seqlen % (2 * world_size) == 0",
        f"{RING_FLASH}, test/test_zigzag_ring_flash_attn_func.py",
    ),
}
STRIPE = {
    **BATCH,
    "full": Says(
        REFUSED,
        "stripe flash attn only supports causal attention",
        f"{RING_FLASH}, stripe_flash_attn.py: an assertion",
    ),
    "uneven length": Says(
        REFUSED,
        "assert seqlen % (2 * world_size) == 0",
        f"{RING_FLASH}, test/test_stripe_flash_attn_func.py",
    ),
}
VARLEN = {
    "window": NO_WINDOW,
    "float64": FLASH_DTYPES,
    "uneven length": Says(
        REFUSED,
        "assert torch.all(cu_seqlens_tensor % world_size == 0)",
        f"{RING_FLASH}, test/test_*_varlen_func.py",
    ),
}
TORCH = {
    "window": Says(NOT_OFFERED, "no argument for a window", f"{CONTEXT_PARALLEL}/_attention.py"),
    "documents": Says(
        NOT_OFFERED, "no argument for boundaries", f"{CONTEXT_PARALLEL}/_attention.py"
    ),
    "uneven length": Says(
        REFUSED,
        "seq_length % (world_size * 2) != 0: raise AssertionError",
        f"{CONTEXT_PARALLEL}/_load_balancer.py",
    ),
}
USP = {
    "documents": Says(
        NOT_OFFERED, "no argument for boundaries", f"{YUNCHANG}, yunchang/hybrid/attn_layer.py"
    ),
    "uneven length": Says(
        REFUSED, "assert seqlen % world_size == 0", f"{YUNCHANG}, test/test_hybrid_attn.py"
    ),
}
USP_EFFICIENT = {
    **USP,
    "backward": Says(
        REFUSED,
        "the backward pass is not supported for AttnType.TORCH_EFFICIENT",
        f"{YUNCHANG}, README.md",
    ),
}
USP_FLASH = {**USP, "float64": FLASH_DTYPES}
USP_ZIGZAG = {
    **USP_FLASH,
    "full": Says(
        REFUSED,
        "zigzag and stripe is load balance strategy for causal=True",
        f"{YUNCHANG}, README.md",
    ),
}
ALST = {
    "uneven length": Says(
        REFUSED,
        "batch's seqlen=... isn't divisible by sp-size=...: raise ValueError",
        "deepspeed/runtime/sequence_parallel/ulysses_sp.py: UlyssesSPDataLoaderAdapter",
    )
}
ALST_SDPA = {
    **ALST,
    "documents": Says(
        REFUSED,
        "sdpa doesn't handle multiple samples combined into one correctly",
        "github.com/huggingface/accelerate, docs/source/concept_guides/sequence_parallelism.md",
    ),
}
HARDCODED = Says(
    REFUSED,
    "currently hardcodes a causal mask_mod: models with sliding window or other non-standard "
    "patterns would need ...",
    "deepspeed/runtime/sequence_parallel/ulysses_sp.py: UlyssesSPAttentionHF.forward",
)
ALST_FLEX = {**ALST, "full": HARDCODED, "window": HARDCODED, "documents": HARDCODED}
ACCELERATE = {
    **TORCH,
    "window": Says(
        REFUSED,
        "Context parallelism does not support attention layers of type sliding_attention",
        "accelerate/big_modeling.py: _attach_context_parallel_hooks",
    ),
}
MEGATRON = {
    "uneven length": Says(
        REFUSED,
        "First dimension of the tensor should be divisible by tensor parallel size",
        "megatron/core/tensor_parallel/mappings.py: an assertion",
    )
}


def _alst(variant: str, says: Mapping[str, Says], **rest: Any) -> Library:
    return Library(
        f"ALST Ulysses {variant}",
        "alst_ulysses",
        "deepspeed transformers",
        variant,
        says=says,
        **rest,
    )


def _flash(variant: str, needs: Needs, says: Mapping[str, Says]) -> Library:
    full = "full" not in says
    return Library(
        f"ring-flash-attn {variant}",
        "ring_flash",
        "ring-flash-attn",
        variant,
        needs,
        says,
        flash=True,
        full=full,
    )


def _usp(variant: str, needs: Needs, says: Mapping[str, Says]) -> Library:
    return Library(
        f"yunchang {variant}",
        "yunchang_usp",
        "yunchang",
        variant,
        needs,
        says,
        flash=True,
        full="full" not in says,
    )


def _packed(layout: str, half: bool) -> Needs:
    return Needs(
        (layout,), layout, "bfloat16", _per_document(half), lambda size: 2 * size, one_sequence=True
    )


LIBRARIES = (
    Library("sp_core", "ours", "sp-core", needs=Needs(("contiguous", "zigzag", "striped"))),
    Library("torch ring", "torch_ring", "torch", needs=Needs(("zigzag", "contiguous")), says=TORCH),
    Library(
        *("torch context_parallel", "torch_context_parallel", "torch"),
        needs=Needs(("zigzag",), "zigzag"),
        says=TORCH,
        # each rank derives DTensor's rules for itself, which takes one much longer than another
        patience=60.0,
    ),
    Library(
        *("DeepSpeed Ulysses", "deepspeed_ulysses", "deepspeed"),
        known={"uneven length": "github.com/deepspeedai/DeepSpeed/issues/7384"},
    ),
    _alst("sdpa", ALST_SDPA),
    _alst(
        "flash_attention_2",
        {**ALST, "float64": FLASH_DTYPES},
        needs=Needs(
            dtype="bfloat16", one_sequence=True
        ),  # transformers knows packed documents in a batch of one only
        flash=True,
    ),
    _alst("flex_attention", ALST_FLEX, full=False, patience=60.0),  # each rank compiles for itself
    *(
        Library(
            *(
                f"accelerate {variant}".strip(),
                "accelerate_context_parallel",
                "accelerate",
                variant,
            ),
            needs=Needs(("zigzag",), "zigzag"),
            says=ACCELERATE,
            patience=60.0,  # as torch context_parallel
        )
        for variant in ("", "CPU stand-in")
    ),
    _usp("basic TORCH_EFFICIENT", Needs(), USP_EFFICIENT),
    _usp("basic TORCH_MATH", Needs(), USP),
    _usp("basic FA", Needs(dtype="bfloat16"), USP_FLASH),
    _usp("zigzag FA", Needs(("zigzag",), "zigzag", "bfloat16", _yunchang_zigzag), USP_ZIGZAG),
    _flash("ring", Needs(dtype="bfloat16"), RING),
    _flash("zigzag", Needs(("zigzag",), "zigzag", "bfloat16"), ZIGZAG),
    _flash("stripe", Needs(("striped",), "striped", "bfloat16"), STRIPE),
    _flash("ring_varlen", _packed("contiguous", False), VARLEN),
    _flash("zigzag_varlen", _packed("zigzag", True), {**VARLEN, "full": CAUSAL_ONLY}),
    _flash(
        "llama3",
        Needs(dtype="bfloat16", one_sequence=True),
        {name: VARLEN[name] for name in ("window", "float64")},
    ),
    Library("sp_core layers", "our_layers", "sp-core", about="layers"),
    *(
        Library(
            *(f"megatron-core {variant}".strip(), "megatron_tp_sp", "megatron-core", variant),
            says=MEGATRON,
            about="layers",
        )
        for variant in ("", "CPU stand-in")
    ),
)
"""Every library; of each subject ours is the first."""
OURS = ("sp_core", "sp_core layers")
"""Those of this project: if one does not pass, the harness is wrong."""


def named(name: str) -> Library:
    """The library of a column."""
    return next(library for library in LIBRARIES if library.name == name)
