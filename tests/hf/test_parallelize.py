"""Test `parallelize`: compare models of transformers on several ranks with those on one process."""

import copy
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kit.meshed import meshed
from oracle.reference import Reference
from torch import Tensor
from transformers import AutoModelForCausalLM

import sp_core as sp
from hf.cases import (
    OWN,
    SEQ_LEN,
    InFloat64,
    count,
    inputs,
    model,
    on_one_process,
)
from sp_core.integrations import transformers as integration
from sp_core.schemes import SCHEMES
from sp_core.testing import record_ratio, run_threads, spmd
from sp_core.testing.outcome import RankFailure
from sp_core.testing.tolerance import bound, check_close

WAYS: list[tuple[str, dict[str, int]]] = [
    *((scheme, {"ring": size}) for scheme in SCHEMES for size in (1, 2, 3, 4)),
    *(("hybrid", {"ring": ring, "ulysses": 4 // ring}) for ring in (1, 2, 4)),
    ("hybrid", {"ulysses": 3, "ring": 1}),
    ("hybrid", {"ulysses": 2, "ring": 1}),
    ("hybrid", {"ulysses": 1, "ring": 1}),
    ("hybrid", {"ulysses": 2, "ring": 2}),
]
"""Each scheme with each of its meshes."""

Values = dict[str, Tensor]


def gathered(logits: Tensor, comm: sp.Communicator, layout: str) -> Tensor:
    """Return the logits of all tokens."""
    sharding = getattr(sp.Sharding, layout)(SEQ_LEN, comm.size)
    shards = sp.all_gather(logits.detach(), comm=comm, dim=1, sizes=sharding.lengths)
    whole: Tensor = sharding.restore(shards, 1)
    return whole


def gradients(parallel: Any) -> Values:
    return {name: p.grad for name, p in parallel.named_parameters() if p.grad is not None}


def check(got: list[Values], want: Reference, leave_out: str = "") -> None:
    """Check that all values of every rank are those of one process, to the elementwise bound."""
    for values in got:
        assert {*values, leave_out} == {*want.values, leave_out}
        for key, value in values.items():
            allowed = bound(want.scales[key], torch.float64)
            record_ratio("parallelize", check_close(key, value, want.values[key], allowed))


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", OWN)
def test_all_values_are_those_of_one_process(
    kind: str, way: tuple[str, dict[str, Any]], packed: bool
) -> None:
    """The logits, the loss and every gradient are compared."""
    (scheme, axes), want = way, on_one_process(kind, packed)
    layouts = integration.LAYOUTS
    layout = layouts[(WAYS.index(way) + packed) % len(layouts)]

    def body(comm: Any) -> Values:
        with InFloat64(), sp.Mesh(comm, **axes) as mesh:
            parallel = integration.parallelize(model(kind), mesh, scheme, layout)
            out = parallel(**inputs(packed))
            out.loss.backward()
            logits = gathered(out.logits, mesh[tuple(axes)], layout)
            return {"logits": logits, "loss": out.loss.detach(), **gradients(parallel)}

    check(run_threads(math.prod(axes.values()), body), want)


def micro_batches(
    kind: str,
    number: int,
    checkpoint: dict[str, bool] | None = None,
    at_once: bool = False,
    replicas: int = 1,
    each: int = 3,
) -> None:
    """Check that several batches before a step give gradients of the mean over all their tokens.

    Args:
        kind: the model's `model_type`.
        number: the number of ranks that share a sequence.
        checkpoint: the options of gradient checkpointing; None turns it off.
        at_once: whether one backward serves all batches.
        replicas: the number of replicas. Each counts the labels of its own batches.
        each: the number of batches of each replica. For a single one, num_items_in_batch is not
            passed.
    """
    seeds = tuple(range(each * replicas))
    want = on_one_process(kind, True, seeds)

    def body(comm: Any) -> Values:
        with InFloat64(), sp.Mesh(comm, dp=replicas, ring=number) as mesh:
            parallel = integration.parallelize(model(kind).train(), mesh)
            if checkpoint is not None:
                parallel.gradient_checkpointing_enable(checkpoint)
            total = torch.zeros((), dtype=torch.float64)
            own = seeds[mesh["dp"].rank :: replicas]
            for seed in own:
                counted = {"num_items_in_batch": torch.tensor(count(own))} if each > 1 else {}
                loss = parallel(**inputs(True, seed), **counted).loss
                total = total + (loss if at_once else loss.detach())
                if not at_once:
                    loss.backward()
            if at_once:
                total.backward()
            return {"loss": total.detach(), **gradients(parallel)}

    check(run_threads(replicas * number, body), want, leave_out="logits")


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("checkpoint", [None, {"use_reentrant": True}, {"use_reentrant": False}])
def test_gradients_add_up_over_micro_batches(kind: str, checkpoint: dict[str, bool] | None) -> None:
    micro_batches(kind, 3, checkpoint=checkpoint)


def test_several_forwards_may_share_a_backward() -> None:
    micro_batches("qwen3", 2, at_once=True)


@pytest.mark.parametrize("replicas", [2, 4])
def test_each_replica_counts_the_labels_of_its_own_micro_batches(replicas: int) -> None:
    """The counts differ: the gradients are those of the mean over the labels of all replicas."""
    assert len({count(tuple(range(3 * replicas))[n::replicas]) for n in range(replicas)}) > 1
    micro_batches("llama", 2, replicas=replicas)


def test_replicas_take_other_sequences() -> None:
    """The loss is the mean over the tokens of all replicas."""
    micro_batches("llama", 2, replicas=2, each=1)


def test_a_gradient_of_one_rank_reaches_all() -> None:
    """One rank uses a parameter, and no rank uses two others, one of which has a gradient."""
    model("llama")

    def body(comm: Any) -> list[Tensor | None]:
        with InFloat64(), sp.Mesh(comm, ring=3) as mesh:
            whole = model("llama")
            added = [torch.nn.Parameter(torch.zeros(1).double()) for _ in range(3)]
            whole.used, whole.idle, whole.earlier = added
            whole.earlier.grad = torch.ones(1).double()
            parallel = integration.parallelize(whole, mesh)
            if comm.rank == 1:
                scale = lambda head, args, logits: logits * (1 + whole.used)  # noqa: E731
                parallel.lm_head.register_forward_hook(scale)
            parallel(**inputs()).loss.backward()
            return [parameter.grad for parameter in added]

    for used, idle, earlier in run_threads(3, body):
        assert used is not None
        assert float(used) != 0
        assert idle is None
        assert earlier is not None
        assert float(earlier) == 1


def test_padding_at_the_end_of_rows_changes_nothing() -> None:
    """Padding at the end needs no mask, because it follows all tokens of its row."""
    given = inputs()
    mask = torch.ones_like(given["input_ids"])
    mask[1, -5:] = 0
    given["labels"] = given["labels"].masked_fill(mask == 0, -100)
    with InFloat64(), torch.no_grad():
        want = model("qwen3")(**given, attention_mask=mask, use_cache=False)

    def body(comm: Any) -> tuple[Tensor, Tensor]:
        with InFloat64(), sp.Mesh(comm, ring=3) as mesh, torch.no_grad():
            out = integration.parallelize(model("qwen3"), mesh)(**given, attention_mask=mask)
            return out.loss, gathered(out.logits, mesh["ring"], "zigzag")

    scales = on_one_process("qwen3", False).scales
    for loss, logits in run_threads(3, body):
        check_close("loss", loss, want.loss, bound(scales["loss"], torch.float64))
        allowed = bound(scales["logits"], torch.float64)
        for row, length in enumerate((SEQ_LEN, SEQ_LEN - 5)):
            at = (row, slice(length))
            check_close("logits", logits[at], want.logits[at], allowed[at])


def own_loss(whole: Any, case: str, added: torch.nn.Linear, ranks: int) -> Tensor:
    """Return a sum over tokens: of an output, a caught activation, or a part of one's own."""
    caught: list[Tensor] = []
    whole.model.norm.register_forward_pre_hook(lambda norm, args: caught.append(args[0]))
    with_states = case == "hidden states" or "part" in case
    tokens = inputs()["input_ids"]
    out = whole(input_ids=tokens, output_hidden_states=with_states, use_cache=False)
    x = caught[0] if "caught" in case else out.logits
    loss: Tensor = (out.hidden_states[1] if case == "hidden states" else x).square().sum()
    if case == "penalty on a part":
        return loss + added.weight.square().sum() / ranks
    return loss + added(out.hidden_states[-1]).square().sum() if "part" in case else loss


OWN_LOSSES = (
    *("logits", "hidden states", "new head", "logits twice", "caught", "caught, recomputed"),
    *("part", "later part", "part of a frozen model", "recomputed part", "penalty on a part"),
)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("case", OWN_LOSSES)
def test_a_loss_of_ones_own_has_the_gradients_of_one_process(case: str) -> None:
    """The head may be replaced before. A part of one's own is added before or afterwards.

    Recomputed layers are inside reentrant checkpoints, which run a backward inside the backward.
    """

    def backward(whole: Any, mesh: sp.Mesh | None = None) -> Values:
        added = torch.nn.Linear(18, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(added.weight, 0.3)
        if case == "new head":
            whole.set_output_embeddings(copy.deepcopy(whole.lm_head))
        if "recomputed" in case:
            whole.train().gradient_checkpointing_enable({"use_reentrant": True})
        whole.requires_grad_(case != "part of a frozen model")
        whole.aux = None if case == "later part" else added
        if mesh:
            integration.parallelize(whole, mesh)
        whole.aux = added
        loss = own_loss(whole, case, added, 2 if mesh else 1)
        loss.backward(retain_graph=True)
        if case == "logits twice":
            loss.backward()
        return gradients(whole)

    with InFloat64():
        want = backward(model("llama"))

    def body(comm: Any) -> Values:
        with InFloat64(), sp.Mesh(comm, ring=2) as mesh:
            return backward(model("llama"), mesh)

    for got in run_threads(2, body):
        assert got.keys() == want.keys()
        for name, grad in got.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-9, atol=1e-9)


@spmd(1)
@meshed("ring")
def test_models_may_share_a_configuration(mesh: sp.Mesh) -> None:
    """The second model computes before it is parallelized, too."""
    config = model("llama").config
    one, other = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    integration.parallelize(one, mesh)
    want = other(**inputs()).loss
    loss = integration.parallelize(other, mesh)(**inputs()).loss
    torch.testing.assert_close(loss, want, check_dtype=False)


@pytest.mark.parametrize("hooked", [None, "lm_head", "model.embed_tokens"])
def test_a_failed_backward_keeps_earlier_gradients(hooked: str | None) -> None:
    """A hook fails before or after other gradients are there; without one `autograd.grad` fails."""
    model("llama")

    def fail(_: Tensor) -> None:
        raise RuntimeError("a hook failed")

    def backward(parallel: Any, loss: Tensor) -> None:
        if hooked is None:
            torch.autograd.grad(loss, [*parallel.parameters()])
        hook = parallel.get_submodule(hooked).weight.register_hook(fail)
        try:
            loss.backward()
        finally:
            hook.remove()

    def body(comm: Any) -> Values:
        with InFloat64(), sp.Mesh(comm, ring=2) as mesh:
            parallel = integration.parallelize(model("llama"), mesh)
            parallel(**inputs()).loss.backward()
            before = {name: grad.clone() for name, grad in gradients(parallel).items()}
            loss = parallel(**inputs(seed=1)).loss
            with pytest.raises(RuntimeError, match=r"Call loss\.backward|a hook failed"):
                backward(parallel, loss)
            assert gradients(parallel).keys() == before.keys()
            assert all(map(torch.equal, gradients(parallel).values(), before.values()))
            parallel(**inputs(seed=1)).loss.backward()
            assert not any(map(torch.equal, gradients(parallel).values(), before.values()))
            return gradients(parallel)

    one, other = run_threads(2, body)
    assert all(map(torch.equal, one.values(), other.values()))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_oss"])
def test_autocast_computes_as_on_one_process(kind: str) -> None:
    """Autocast leaves rotated queries and keys in float32, and has the values in bfloat16."""

    def loss(whole: Any) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = whole(**inputs(), use_cache=False).loss
        found.backward()
        assert all(x.isfinite().all() for x in gradients(whole).values())
        return found.item()

    want = loss(model(kind).float())

    def body(comm: Any) -> float:
        with sp.Mesh(comm, ring=2) as mesh:
            return loss(integration.parallelize(model(kind).float(), mesh))

    assert run_threads(2, body) == [pytest.approx(want, rel=0.03)] * 2


FAULTS = {
    "labels are not moved": ("value=IGNORED)[:, 1:]", "value=IGNORED)[:, :-1]"),
    "documents see each other": ("documents=documents", "documents=None"),
    "the window is ignored": ("window=sliding_window", "window=None"),
    "every rank takes the first shard": (".shard(x, comm.rank, 1)", ".shard(x, 0, 1)"),
    "earlier gradients are summed again": ("parameter.grad = None", "pass"),
    "an idle weight loses its gradient": ("= earlier if new is None", "= new if new is None"),
    "the mean is that of each micro-batch": ("count=count", "count=None"),
    "a replica's count is that of all": ("sum(counts)", "counts[0] * len(counts)"),
    "an idle rank hides a gradient": ('op="max"', 'op="min"'),
    "gradients stay parts": ("reduce_gradients(wanted,", "list((wanted,)) or dict("),
}  # fmt: skip
"""Faults of the integration by name, each as old and new source text."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = FAULTS[name]
    text = Path(integration.__file__).read_text()
    assert text.count(old) == 1
    faulty = ModuleType(integration.__name__)
    exec(compile(text.replace(old, new), name, "exec"), vars(faulty))
    monkeypatch.setattr(sys.modules[__name__], "integration", faulty)
    with pytest.raises((AssertionError, RankFailure)):
        test_the_checks_of_faults_pass_without_a_fault()


def test_the_checks_of_faults_pass_without_a_fault() -> None:
    micro_batches("mistral", 2)
    micro_batches("llama", 1, replicas=2)
    test_a_gradient_of_one_rank_reaches_all()
