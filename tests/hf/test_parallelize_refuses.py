"""Test that `parallelize` refuses wrong models, settings and inputs, alike on every rank."""

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, DynamicCache

import sp_core as sp
from hf.cases import EXPERTS, SIZES, inputs, model
from sp_core.integrations.transformers import one_process, parallelize
from sp_core.testing import run_threads

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": torch.ones(2, 1, 21, 21)}, "mask has shape"),
    ({"attention_mask": {}}, "must be a tensor"),
    ({"attention_mask": torch.arange(21).expand(2, 21) > 3}, "Pad on the"),
    ({"attention_mask": torch.arange(21).expand(2, 21) < 9}, "has labels"),
    ({"attention_mask": torch.full((2, 21), 2)}, "leave it out"),
    ({**inputs(True), "attention_mask": torch.ones(2, 21)}, "position_ids that restart"),
    ({"past_key_values": DynamicCache()}, "past_key_values"),
    ({"use_cache": True}, "use_cache"),
    ({"output_attentions": True}, "output_attentions"),
    ({"inputs_embeds": torch.ones(2, 21, 18)}, "inputs_embeds"),
    ({"logits_to_keep": 1}, "logits_to_keep"),
    ({"cu_seq_lens_q": torch.tensor([0, 21])}, "cu_seq_lens_q"),
    ({"input_ids": None}, "must be a tensor"),
    ({"input_ids": torch.arange(19)}, "input_ids has shape"),
    ({"labels": torch.ones(2, 11).long()}, "labels has shape"),
    ({"position_ids": torch.arange(42).view(2, 21) % 20}, "all rows of a batch"),
    (inputs(seq_len=1), "at least one token"),
    ({"input_ids": torch.full((2, 21), 19)}, "token 19 was given; the vocabulary has 0..18"),
    ({"input_ids": torch.full((2, 21), -1)}, "token -1 was given"),
    ({"labels": torch.full((2, 21), 19)}, "label 19 was given"),
    ({"labels": torch.ones(2, 21).int()}, "labels has dtype torch.int32; needed is one of int64"),
    ({"input_ids": torch.ones(2, 21)}, "input_ids has dtype torch.float32"),
    ({name: x[:0] for name, x in inputs().items()}, "at least one sequence"),
]  # fmt: skip
"""Arguments of a forward, and a part of the error's text."""


def qwen3() -> Any:
    return model("qwen3")


def configured(kind: str = "llama", head: str = "ForCausalLM", **settings: Any) -> Any:
    config = AutoConfig.for_model(kind, **{**SIZES, **settings})
    return getattr(transformers, f"{type(config).__name__.removesuffix('Config')}{head}")(config)


@dataclass(frozen=True)
class Wrong:
    """A use that is refused.

    Args:
        text: a part of the error's text.
        use: a function that is called with the parallelized model and the mesh.
        made: a function that makes the model.
        axes: the axes of the mesh.
        arguments: more arguments of `parallelize`.
    """

    text: str
    use: Callable[[Any, sp.Mesh], object] = lambda parallel, mesh: None
    made: Callable[[], Any] = qwen3
    axes: Mapping[str, Any] = field(default_factory=lambda: {"ring": 2})
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def error(self, whole: Any, comm: Any) -> str:
        """Return the error of this rank as text, or "" if there is none."""
        with sp.Mesh(comm, **self.axes) as mesh:
            try:
                self.use(parallelize(copy.deepcopy(whole), mesh, **self.arguments), mesh)
            except (ValueError, TypeError, RuntimeError) as error:
                return f"{type(error).__name__}: {error}"
            return ""


def called(wrong: dict[str, Any], ranks: tuple[int, ...]) -> Callable[[Any, sp.Mesh], object]:
    """Return a use that passes wrong inputs on some ranks."""
    return lambda parallel, mesh: parallel(**{**inputs(), **(wrong if mesh.rank in ranks else {})})


def changed(name: str, value: Any, of: str = "config") -> Callable[[Any, sp.Mesh], object]:
    """Return a use that changes a setting of the model on rank 1, and calls the model."""

    def use(parallel: Any, mesh: sp.Mesh) -> None:
        if mesh.rank == 1:
            setattr(parallel.config if of == "config" else parallel.get_submodule(of), name, value)
        parallel(**inputs())

    return use


def other_frozen(parallel: Any, mesh: sp.Mesh) -> None:
    parallel.model.layers[mesh.rank].requires_grad_(False)
    parallel(**inputs())


def late(parallel: Any, mesh: sp.Mesh) -> None:
    """Add a part to the model after its forward, and use it in the loss."""
    out = parallel(**inputs(), output_hidden_states=True)
    parallel.aux = torch.nn.Linear(18, 1).double()
    (out.loss + parallel.aux(out.hidden_states[-1].double()).sum()).backward()


def own_forward(parallel: Any, mesh: sp.Mesh) -> None:
    """Compute the loss in a forward of one's own, as a faster kernel for it may do."""
    given = parallel.forward
    parallel.forward = lambda labels, **others: given(**others)
    parallel(**inputs())


def uncounted(parallel: Any, mesh: sp.Mesh) -> None:
    """Call the model as Trainer does with `label_smoothing_factor`."""
    parallel(input_ids=inputs()["input_ids"], num_items_in_batch=5)


def own_loss() -> Any:
    whole = qwen3()
    whole.loss_function = torch.nn.functional.cross_entropy
    return whole


def lowered(parallel: Any, mesh: sp.Mesh) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=mesh.rank == 1):
        parallel(**inputs())


def hooked(parallel: Any, mesh: sp.Mesh, ranks: tuple[int, ...]) -> None:
    """Step an optimizer in backward on some ranks, when a weight gets the rank's own gradient."""
    weight = next(parallel.parameters())
    if mesh.rank in ranks:
        weight.register_post_accumulate_grad_hook(lambda x: x.data.sub_(x.grad))
    with torch.no_grad():
        parallel(**inputs())
    before = weight.detach().clone()
    try:
        parallel(**inputs()).loss.backward()
    finally:
        assert torch.equal(weight, before)


def other_weights(change: Callable[[torch.Tensor], object]) -> Callable[[Any, sp.Mesh], object]:
    """Return a use that parallelizes models, of which rank 1 has changed a weight."""

    def use(parallel: Any, mesh: sp.Mesh) -> None:
        whole = qwen3()
        if mesh.rank:
            change(next(whole.parameters()).data)
        parallelize(whole, mesh)

    return use


def other_settings(**wrong: Any) -> Callable[[Any, sp.Mesh], object]:
    """Return a use that parallelizes models with equal weights, and wrong settings on rank 1."""
    # a row of 11 float32 numbers is no multiple of 8 bytes, but the whole weight (18, 11) is
    one, other = (configured(intermediate_size=11, **settings) for settings in ({}, wrong))
    other.load_state_dict(one.state_dict())
    return lambda parallel, mesh: parallelize(other if mesh.rank else one, mesh)


FACTORS = {"factor": 2.0, "short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
DIFFERENT: list[dict[str, Any]] = [
    {"rms_norm_eps": 0.1},
    {"hidden_act": "gelu"},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_theta": 100.0},
]

CASES = [
    *(Wrong(text, called(wrong, ranks)) for wrong, text in REFUSED for ranks in ((0, 1), (1,))),
    Wrong("attention_dropout=0.1", changed("attention_dropout", 0.1, "model.layers.0.self_attn")),
    Wrong("is_causal=False", changed("is_causal", False)),
    Wrong("is_causal=False", changed("is_causal", False, "model.layers.1.self_attn")),
    Wrong("is_causal=False", made=lambda: configured("qwen2", is_causal=False)),
    Wrong("neftune_noise_alpha=5.0", changed("neftune_noise_alpha", 5.0, "model.embed_tokens")),
    Wrong("loss_function computes another", changed("loss_function", len, "")),
    Wrong("loss_function computes another", made=own_loss),
    Wrong("forward computes another loss", own_forward),
    Wrong("Do this before a forward", late),
    Wrong("counts the labels of one replica", uncounted, axes={"dp": 2}),
    *(Wrong("ranks disagree", lowered, axes={axis: 2}) for axis in ("ring", "dp")),
    Wrong("labelled=False", called({"labels": None}, (1,)), axes={"dp": 2, "ring": 1}),
    Wrong("output_router_logits=True", changed("output_router_logits", True)),
    Wrong("was changed to 'sdpa'", changed("_attn_implementation", "sdpa")),
    Wrong("ranks disagree", lambda parallel, mesh: parallel(**inputs(seed=mesh.rank))),
    Wrong("ranks disagree", called({"labels": inputs(seed=1)["labels"]}, (1,))),
    Wrong("ranks disagree", called({"position_ids": inputs(True)["position_ids"]}, (1,))),
    Wrong("ranks disagree", called({"attention_mask": torch.ones(2, 21)}, (1,))),
    Wrong("ranks disagree", lambda parallel, mesh: parallel.train(mesh.rank == 0)(**inputs())),
    *(Wrong("step the optimizer after", partial(hooked, ranks=ranks)) for ranks in ((0, 1), (1,))),
    Wrong("not its forward", lambda parallel, mesh: parallel.forward(**inputs())),
    *(Wrong("ranks disagree", other_frozen, axes={axis: 2}) for axis in ("ring", "dp")),
    Wrong("ranks disagree", other_weights(lambda weight: weight[0, 0].add_(1))),
    Wrong("ranks disagree", other_weights(lambda weight: weight.copy_(weight.flip(0)))),
    Wrong("ranks disagree", other_weights(lambda weight: weight.copy_(weight.flip(1)))),
    *(Wrong("ranks disagree", other_settings(**wrong)) for wrong in DIFFERENT),
    Wrong("was parallelized before", parallelize),
    Wrong("not its forward", lambda parallel, _: parallel.model(**inputs(), use_cache=False)),
    Wrong(
        "use_cache", lambda parallel, _: parallel.generate(inputs()["input_ids"], max_new_tokens=2)
    ),
    Wrong(
        "Call loss.backward()",
        lambda parallel, _: torch.autograd.grad(
            parallel(**inputs()).loss, [*parallel.parameters()]
        ),
    ),
    Wrong("attention_dropout=0.1", made=lambda: configured(attention_dropout=0.1)),
    Wrong("without these settings", made=lambda: configured(attention_dropout=0.1)),
    *(
        Wrong(
            f"rope_type={kind!r}",
            made=partial(configured, rope_scaling=FACTORS | {"rope_type": kind}),
        )
        for kind in ("dynamic", "longrope")
    ),
    Wrong(
        "output_router_logits=True",
        made=lambda: configured("qwen3_moe", **EXPERTS, output_router_logits=True),
    ),
    Wrong("model_type 'gpt2'", made=lambda: configured("gpt2", "LMHeadModel")),
    Wrong("no language model head", made=lambda: configured(head="ForSequenceClassification")),
    Wrong("PreTrainedModel is needed", made=lambda: torch.nn.Linear(2, 2)),
    Wrong("scheme 'rings'", arguments={"scheme": "rings"}),
    Wrong("scheme 'hybrid'", arguments={"scheme": "hybrid"}),
    Wrong("layout='random'", arguments={"layout": "random"}),
    Wrong("axis 'tp' of the mesh. Name axes 'ring' or 'ulysses'", axes={"tp": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text)
def test_what_is_wrong_is_refused_on_every_rank(case: Wrong) -> None:
    whole = case.made()
    (error,) = {*run_threads(2, lambda comm: case.error(whole, comm))}
    assert case.text in error


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_only_places_may_differ_between_ranks(packed: bool) -> None:
    """The folder of a model may differ, and how a row lies in memory."""
    whole = qwen3()
    row = {name: x[:1].contiguous() for name, x in inputs(packed).items()}
    if not packed:
        row["attention_mask"] = torch.ones(1, 21, dtype=torch.bfloat16)
    strided = {name: x.repeat_interleave(2, 1)[:, ::2] for name, x in row.items()}

    def body(comm: Any) -> tuple[float, float]:
        with sp.Mesh(comm, ring=2) as mesh:
            mine = copy.deepcopy(whole)
            mine.config._name_or_path = f"/node{mesh.rank}/model"
            parallel = parallelize(mine, mesh)
            plain, mixed = (parallel(**x).loss for x in (row, strided if mesh.rank else row))
            return plain.item(), mixed.item()

    for plain, mixed in run_threads(2, body):
        assert plain == mixed > 0


def test_averaging_by_torch_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    whole = model("qwen3")

    def body(comm: Any) -> None:
        with sp.Mesh(comm, ring=1) as mesh:
            wrapped = torch.nn.parallel.DistributedDataParallel(parallelize(whole, mesh))
            with pytest.raises(ValueError, match="inside DistributedDataParallel"):
                wrapped(**inputs())

    try:
        run_threads(1, body)
    finally:
        torch.distributed.destroy_process_group()


def test_variables_of_launchers_are_hidden_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"]
    names += ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    for name in names:
        monkeypatch.setenv(name, f"of {name}")
    monkeypatch.delenv(names[0])
    before = dict(os.environ)
    for number in (1, 0):
        with suppress(ZeroDivisionError), one_process():
            assert os.environ.keys() == before.keys() - {*names}
            assert 1 // number
        assert dict(os.environ) == before
