"""Test every public call over its declared domain: each part of each parameter is drawn."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from domains.declared import Call, Parts, Subject, Values, normal
from domains.public import defaults, never_changed, without_domain
from domains.report import changed, committed, impossible_pairs, parts_of
from domains.subjects import BY_NAME, SUBJECTS
from domains.trial import Tried, draw_singles, every_pair, finished
from oracle.collective_cases import MEMORIES, in_memory
from torch import Tensor

from sp_core.attention import attend_backward
from sp_core.schemes import problem
from sp_core.testing import run_threads

FEW_PAIRS = 700
"""The greatest number of pairs of parts that a session draws, for rows of a single rank."""
SEED = int(os.environ.get("SP_DOMAIN_SEED", "1"))


INTEGERS: list[Callable[[int], Any]] = [
    *[int] * 4,
    np.min_scalar_type,
    lambda number: np.min_scalar_type(-abs(number) - 1),
    lambda number: np.int64,
    lambda number: np.uint64 if number >= 0 else np.int64,
]
"""Functions that return the type in which a number is passed: Python's, or one of NumPy's.

Sums of NumPy's numbers may wrap, and they lack methods of Python's."""


def as_integers(kind: Callable[[int], Any], given: Any) -> Any:
    """Return a value with its whole numbers below 2**63, also those in lists, in other types."""
    if type(given) is int and abs(given) < 2**63:
        return given if kind is int else np.dtype(kind(given)).type(given)
    if isinstance(given, (list, tuple)) and type(given) in (list, tuple, torch.Size):
        items = [as_integers(kind, item) for item in given]
        return items if isinstance(given, list) else tuple(items)
    return given


def with_integers(subject: Subject) -> Subject:
    """Return a subject of which half of the calls get numbers of NumPy, alike on all ranks."""

    @contextmanager
    def prepare(comm: Any, drawn: Values) -> Iterator[Call]:
        kind = INTEGERS[drawn["seed"] % len(INTEGERS)]
        with subject.prepare(comm, drawn) as call:
            given = {name: as_integers(kind, value) for name, value in call.arguments.items()}
            yield replace(call, arguments=given)

    return replace(subject, prepare=prepare)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_every_part_of_every_domain_is_drawn(subject: Subject) -> None:
    subject, impossible = with_integers(subject), impossible_pairs(subject.name, committed())
    tried = draw_singles(subject, SEED, impossible)
    assert tried.singles == subject.singles()
    if "comm.ranks" not in subject.factors and len(subject.pairs()) <= FEW_PAIRS:
        every_pair(subject, SEED, tried)
        assert tried.pairs | {*impossible} >= subject.pairs()


def test_every_public_parameter_has_a_domain() -> None:
    what_to_do = "declare it in tests/domains/, or say in OUTSIDE of domains/public.py why not"
    assert without_domain(SUBJECTS) == [], what_to_do


ON_A_GPU = {"sp-core generate(device)", "sp-core logits(device)"}
"""Parameters that have a second value on a GPU only."""


def test_every_parameter_with_a_default_is_drawn_with_another_value_too() -> None:
    assert never_changed(SUBJECTS) - ON_A_GPU == set(), "give it a second part in tests/domains/"


def test_every_part_was_explored() -> None:
    """The committed report lists exactly the parts that are declared today."""
    assert changed(SUBJECTS, committed()) == [], "run nox -s domains, commit its two reports"
    assert not [record["subject"] for record in committed() if record["fault"]]
    assert all(
        record["drawn"] == record["possible"]
        for record in committed()
        if record["depth"] == "pairs"
    )


def test_a_part_without_its_generator_is_seen() -> None:
    subject = BY_NAME["dropout"]
    records = [{"subject": subject.name, "parts": parts_of(subject)}]
    assert changed([subject], records) == []
    fewer = {**subject.factors, "p": dict([*subject.factors["p"].items()][:-1])}
    assert changed([replace(subject, factors=fewer)], records) == ["dropout p"]
    two: Parts = {"0.3": lambda chance, drawn: 2.0}
    refused = {**subject.factors, "p": subject.factors["p"] | two}
    with pytest.raises(AssertionError, match=r"dropout refuses "):
        draw_singles(replace(subject, factors=refused), SEED)


def test_a_result_without_numbers_draws_no_part() -> None:
    subject, tried = BY_NAME["dropout"], Tried()
    row = subject.base | {"x.seq_len": "1", "x.heads": "4 to 9"}
    tried.row(subject, row | {"x.batch": "0"}, SEED)
    assert not tried.singles
    tried.row(subject, row | {"x.batch": "1"}, SEED)
    assert tried.singles == {*row.items(), ("x.batch", "1")} - {("x.batch", "2 to 3")}


def test_a_parameter_without_a_domain_is_seen() -> None:
    subject = BY_NAME["all_gather"]
    fewer = {name: parts for name, parts in subject.factors.items() if name != "sizes"}
    assert "all_gather(sizes)" in without_domain([replace(subject, factors=fewer)])
    assert not [name for name in without_domain([subject]) if name.startswith("all_gather(")]


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a token left out": lambda x: torch.cat([0 * x[:, :, :1], x[:, :, 1:]], 2),
    "a token counted twice": lambda x: torch.cat([2 * x[:, :, :1], x[:, :, 1:]], 2),
    "each token for the next, the last of a rank for its first": lambda x: x.roll(1, 2),
    "a scale off by 1e-9": lambda x: x * (1 + 1e-9),
}
"""Functions that make a gradient of one rank's queries, keys or values, (B, H, S, D), wrong."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", range(3))
def test_a_fault_among_thousands_of_tokens_is_seen(
    fault: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound grows with the number of terms in a sum, but stays far below one term."""

    def wrong(*given: Any, **named: Any) -> list[Tensor]:
        grads = [*attend_backward(*given, **named)]
        grads[place] = FAULTS[fault](grads[place])
        return grads

    monkeypatch.setattr(problem, "attend_backward", wrong)
    subject = BY_NAME["SelfAttention"]
    with pytest.raises(AssertionError, match=r"times the bound"):
        Tried().row(subject, subject.base | {"x.seq_len": "thousands"}, SEED)


SWITCHES = (
    *("causal", "chat", "copy", "deterministic", "gated", "is_agreed", "lse_grad", "measure"),
    *("offload", "own", "partial", "recompute", "return_lse", "shared", "sinks", "sinks_grad"),
    *("tie_word_embeddings", "tp_sp"),
)
"""The parameters that are False by default."""
DEFAULTS: dict[str, set[float | str]] = {
    **{x: {False} for x in SWITCHES},
    **{x: {True} for x in ["always", "bias", "training"]},
    **{x: {1} for x in ["batch", "dp", "offset", "pp", "ranks_per_node", "ring", "tp", "unit"]},
    **{
        x: {0}
        for x in [
            "bytes_sent",
            "dim",
            "dropout",
            "first",
            "last",
            "longest",
            "messages",
        ]
    },
    **{x: {0} for x in ["root", "seed", "start", "temperature"]},
    **{x: {"auto"} for x in ["algorithm", "transport"]},
    "base": {1e4},
    "check": {"agree"},
    "chunk": {1024},
    "device": {"cpu"},
    "dtype": {"bfloat16"},
    "eps": {1e-5, 1e-6},
    "head_dim": {128},
    "how": {""},
    "layout": {"zigzag"},
    "max_position_embeddings": {2048},
    "max_tokens": {64},
    "name": {"communicator", "exchange"},
    "norm": {"layer"},
    "op": {"sum"},
    "pass_tokens": {1024},
    "rms_norm_eps": {1e-6},
    "rope_theta": {1e4},
    "scheme": {"ring"},
    "show": {10},
    "timeout": {86400},
    "tolerance": {0.02},
    "top": {5},
    "ulysses": {1, "ulysses"},
}
"""The default of every parameter that has a number, boolean or text, by the parameter's name."""


def test_an_argument_that_is_left_out_stays_what_it_was() -> None:
    """Other tests would not notice a changed default, because most pass all arguments."""
    assert defaults() == DEFAULTS, "write the default into DEFAULTS, if the change is meant"


def lying(x: Tensor, memory: str) -> Tensor:
    """Return x in the memory layout that is named; "rows apart" has NaN between the rows."""
    if memory == "rows apart" and x.dim():
        beside = torch.full_like(x[..., :1], torch.nan)
        return torch.cat([beside, x, beside], -1)[..., 1:-1]
    return in_memory(x, memory) if x.dim() else x


SHOWING = {"x.gradient": "True", "x.shape": "more dims"}
"""Parts of a domain with which the gradient of a result may have several memory layouts."""
DIFFERENTIABLE = [
    *(
        (subject, {name: part for name, part in SHOWING.items() if name in subject.factors})
        for subject in SUBJECTS
        if {"v.upstream", "x.upstream", "q.upstream", "tensors.upstream"} & {*subject.factors}
        and subject.name != "Rope"  # its result is not a tensor
    ),
    (BY_NAME["loss.next_token_loss"], {}),
    (BY_NAME["llama.Llama.forward"], {}),
    (BY_NAME["llama.Llama.forward"], {"tp_sp": "True", "mesh.axes": "tp"}),
]


@pytest.mark.parametrize(("subject", "parts"), DIFFERENTIABLE, ids=lambda x: getattr(x, "name", ""))
def test_an_upstream_gradient_may_lie_in_memory_in_any_way(
    subject: Subject, parts: dict[str, str]
) -> None:
    """Neither the gradient nor the memory beside it is changed."""
    drawn = subject.draw(subject.base | parts, SEED)
    run_threads(subject.ranks(drawn), partial(check_upstream, subject, drawn))


def check_upstream(subject: Subject, drawn: Values, comm: Any) -> None:
    with subject.prepare(comm, drawn) as call:
        made = finished(call())
        results = [y for y in (made if isinstance(made, tuple) else [made]) if y.requires_grad]
        leaves = leaves_of(results)
        assert leaves
        for memory in (*MEMORIES, "rows apart"):
            dtypes = [str(y.dtype).removeprefix("torch.") for y in results]
            numbers = [normal(1, y.shape, dtype) for y, dtype in zip(results, dtypes, strict=True)]
            upstream = [lying(x, memory) for x in numbers]
            before = [stored(x).clone() for x in upstream]
            plain = [x.clone(memory_format=torch.contiguous_format) for x in upstream]
            wanted, found = (
                torch.autograd.grad(results, leaves, given, retain_graph=True)
                for given in (plain, upstream)
            )
            torch.testing.assert_close(found, wanted, msg=f"{{}} {memory}".format)
            assert all(map(torch.equal, map(stored, upstream), before)), memory


def leaves_of(results: list[Tensor]) -> list[Tensor]:
    """Return all autograd leaves that the results depend on."""
    found: dict[Any, Tensor | None] = {}
    ahead: list[Any] = [y.grad_fn for y in results]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found[node] = getattr(node, "variable", None)
            ahead += [further for further, _ in node.next_functions]
    return [x for x in found.values() if x is not None]


def stored(x: Tensor) -> Tensor:
    """Return the whole memory of which a tensor is a view, as a tensor."""
    return x.new_empty(0, dtype=torch.uint8).set_(x.untyped_storage())
