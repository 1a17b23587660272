"""`parallelize` refuses what would be wrong, with the same error on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, DynamicCache

import sp_core as sp
from hf.cases import EXPERTS, SIZES, inputs, model
from sp_core.integrations.transformers import parallelize
from sp_core.testing import run_threads

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mask of four dims": ({"attention_mask": torch.ones(2, 1, 21, 21)}, "mask has shape"),
    "a mask by layers": ({"attention_mask": {}}, "must be a tensor"),
    "padding before tokens": ({"attention_mask": torch.arange(21).expand(2, 21) > 3}, "Pad on the"),
    "labels of padding": ({"attention_mask": torch.arange(21).expand(2, 21) < 9}, "has labels"),
    "documents in the mask": ({"attention_mask": torch.full((2, 21), 2)}, "leave it out"),
    "a cache": ({"past_key_values": DynamicCache()}, "past_key_values"),
    "making a cache": ({"use_cache": True}, "use_cache"),
    "attentions": ({"output_attentions": True}, "output_attentions"),
    "embeddings": ({"inputs_embeds": torch.ones(2, 21, 18)}, "inputs_embeds"),
    "a part of the logits": ({"logits_to_keep": 1}, "logits_to_keep"),
    "boundaries": ({"cu_seq_lens_q": torch.tensor([0, 21])}, "cu_seq_lens_q"),
    "no tokens": ({"input_ids": None}, "must be a tensor"),
    "one row": ({"input_ids": torch.arange(19)}, "input_ids has shape"),
    "a shard": ({"labels": torch.ones(2, 11).long()}, "labels has shape"),
    "unlike rows": ({"position_ids": torch.arange(42).view(2, 21) % 25}, "all rows of a batch"),
    "fewer tokens than ranks": (inputs(seq_len=1), "at least one token"),
}  # fmt: skip
"""Arguments of a forward, and what the error says."""


def errors(
    made: Callable[[sp.Mesh], Any], call: Callable[[Any, int], Any], **axes: Any
) -> set[str]:
    """What two ranks raise in `call` of what was made and the rank."""

    def body(comm: Any) -> str:
        with sp.Mesh(comm, **(axes or {"ring": 2})) as mesh:
            given = made(mesh)
            try:
                call(given, comm.rank)
            except (ValueError, TypeError, RuntimeError) as error:
                return f"{type(error).__name__}: {error}"
            return ""

    return {*run_threads(2, body)}


def made_parallel(mesh: sp.Mesh) -> Any:
    return parallelize(model("qwen3"), mesh)


@pytest.mark.parametrize("on_one_rank", [False, True], ids=["on both", "on one rank"])
@pytest.mark.parametrize("name", REFUSED)
def test_wrong_inputs_are_refused_on_every_rank(name: str, on_one_rank: bool) -> None:
    wrong, text = REFUSED[name]
    model("qwen3")

    def call(parallel: Any, rank: int) -> None:
        parallel(**{**inputs(), **(wrong if rank or not on_one_rank else {})})

    (error,) = errors(made_parallel, call)
    assert text in error


def change(name: str, value: Any) -> Callable[[Any, int], Any]:
    """Change a setting of a parallelized model on rank 1, and call it."""

    def call(parallel: Any, rank: int) -> None:
        changed = (
            parallel.model.layers[0].self_attn if name == "attention_dropout" else parallel.config
        )
        if rank == 1:
            setattr(changed, name, value)
        parallel(**inputs())

    return call


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (change("attention_dropout", 0.1), "attention_dropout=0.1"),
        (change("output_router_logits", True), "output_router_logits=True"),
        (change("_attn_implementation", "sdpa"), "was changed to 'sdpa'"),
        (lambda parallel, rank: parallel(**inputs(seed=rank)), "ranks disagree"),
        (lambda parallel, rank: parallel.train(rank == 0)(**inputs()), "ranks disagree"),
        (lambda parallel, rank: parallel.model(**inputs(), use_cache=False), "the model itself"),
        (
            lambda parallel, rank: parallel.generate(inputs()["input_ids"], max_new_tokens=2),
            "use_cache",
        ),
        (
            lambda parallel, rank: torch.autograd.grad(
                parallel(**inputs()).loss, [*parallel.parameters()]
            ),
            "Call loss.backward()",
        ),
    ],
)
def test_wrong_uses_are_refused_on_every_rank(call: Callable[[Any, int], Any], text: str) -> None:
    model("qwen3")
    (error,) = errors(made_parallel, call)
    assert text in error


def configured(kind: str = "llama", head: str = "ForCausalLM", **settings: Any) -> Any:
    config = AutoConfig.for_model(kind, **{**SIZES, **settings})
    return getattr(transformers, f"{type(config).__name__.removesuffix('Config')}{head}")(config)


@pytest.mark.parametrize(
    ("made", "arguments", "text"),
    [
        (lambda: configured(attention_dropout=0.1), {}, "attention_dropout=0.1"),
        (
            lambda: configured(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            {},
            "rope_type='dynamic'",
        ),
        (
            lambda: configured("qwen3_moe", **EXPERTS, output_router_logits=True),
            {},
            "output_router_logits=True",
        ),
        (lambda: configured("gpt2", "LMHeadModel"), {}, "model_type 'gpt2'"),
        (lambda: configured(head="ForSequenceClassification"), {}, "no language model head"),
        (lambda: torch.nn.Linear(2, 2), {}, "PreTrainedModel is needed"),
        (configured, {"scheme": "rings"}, "scheme 'rings'"),
        (configured, {"scheme": "hybrid"}, "scheme 'hybrid'"),
        (configured, {"layout": "random"}, "layout='random'"),
        (configured, {"axes": {"tp": 2}}, "use ('dp', 'ring', 'ulysses') only"),
    ],
)
def test_wrong_models_are_refused_on_every_rank(
    made: Callable[[], Any], arguments: dict[str, Any], text: str
) -> None:
    wrong, axes = made(), arguments.get("axes", {})
    others = {name: value for name, value in arguments.items() if name != "axes"}

    def call(mesh: sp.Mesh, rank: int) -> None:
        parallelize(copy.deepcopy(wrong), mesh, **others)

    (error,) = errors(lambda mesh: mesh, call, **axes)
    assert text in error


def test_other_weights_on_a_rank_are_refused() -> None:
    model("qwen3")

    def call(mesh: sp.Mesh, rank: int) -> None:
        whole = model("qwen3")
        with torch.no_grad():
            next(whole.parameters())[0, 0] += rank
        parallelize(whole, mesh)

    (error,) = errors(lambda mesh: mesh, call)
    assert "ranks disagree" in error


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


def test_a_model_is_parallelized_once() -> None:
    model("qwen3")

    def call(mesh: sp.Mesh, rank: int) -> None:
        parallelize(made_parallel(mesh), mesh)

    (error,) = errors(lambda mesh: mesh, call)
    assert "was parallelized before" in error
