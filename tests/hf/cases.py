"""Make tiny models of transformers with random weights, and compute their results on one process.

transformers computes norms, rotary angles, router probabilities and the loss in float32, even in a
float64 model. `InFloat64` replaces these casts, on both sides of a comparison.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from oracle import reference
from torch import Tensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

VOCAB, BATCH, SEQ_LEN = 19, 2, 21
DOCUMENTS = (0, 8, 9, 13, SEQ_LEN)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 18,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
EXPERTS: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {
        "sliding_window": 5,  # in every second layer
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gpt_oss": {
        "sliding_window": 5,  # in every second layer
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
}
"""Architectures by `model_type`, each with the settings that only it has."""


class InFloat64(TorchFunctionMode):
    """Compute everything in this thread in float64: replace float32 in every call of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward:
            return self._backward(args[0], (kwargs or {}).get("retain_graph") or False)
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wide = {name: _wider(x) for name, x in (kwargs or {}).items()}
        return func(*map(_wider, args), **wide)

    def _backward(self, loss: Tensor, keep: bool) -> None:
        """Run autograd's engine inside the mode: recomputed checkpoints need it.

        Torch disables the mode inside its own functions, so `Tensor.backward` cannot be called.
        """
        engine: Any = torch.autograd.Variable._execution_engine
        flags = {"allow_unreachable": True, "accumulate_grad": True}
        with self:
            engine.run_backward((loss,), (torch.ones_like(loss),), keep, False, (), **flags)


def _wider(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


@cache
def _made(kind: str) -> Any:
    config = AutoConfig.for_model(kind, **{**SIZES, **OWN[kind]})
    config._experts_implementation = "eager"  # the grouped product takes no float64
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float64
    )
    random = torch.Generator().manual_seed(len(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(drawn * 0.4 + (parameter.dim() == 1))
    return model


def model(kind: str) -> Any:
    """Return a new model. Each call with the same kind gives the same weights.

    The first call of a kind must not run beside other threads: transformers sets a global dtype.
    """
    return copy.deepcopy(_made(kind))


def inputs(packed: bool = False, seed: int = 0, seq_len: int = SEQ_LEN) -> dict[str, Tensor]:
    """Return whole sequences with labels, some of which are ignored."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (BATCH, seq_len), generator=random)
    ignored = torch.rand(tokens.shape, generator=random) < 0.3
    given = {"input_ids": tokens, "labels": tokens.masked_fill(ignored, -100)}
    if packed:
        lengths = torch.tensor(DOCUMENTS).diff().tolist()
        given["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    return given


def count(seeds: tuple[int, ...]) -> int:
    """Return the number of labels in the batches of these seeds, as Trainer counts them."""
    return sum(int((inputs(seed=seed)["labels"][:, 1:] != -100).sum()) for seed in seeds)


@cache
def on_one_process(kind: str, packed: bool, seeds: tuple[int, ...] = (0,)) -> reference.Reference:
    """Return the logits, the loss and each gradient that transformers computes for some batches.

    The logits are those of the last batch. The loss is the mean over the tokens of all batches.
    """
    whole, number = model(kind), count(seeds)

    def run(
        rounding: Callable[[Tensor], Tensor], named: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = torch.zeros((), dtype=torch.float64)
        with InFloat64(), _rounded(whole, rounding):
            for seed in seeds:
                given = {**inputs(packed, seed), "use_cache": False, "num_items_in_batch": number}
                if packed and kind == "gpt_oss":
                    given["attention_mask"] = document_masks(whole, given)
                out = functional_call(whole, named, kwargs=given)
                loss = loss + out.loss
        return loss, {"logits": out.logits, "loss": loss}

    return reference.sensitivity(run, dict(whole.named_parameters()))


def document_masks(whole: Any, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Make the masks of packed documents, which transformers' gpt-oss does not make itself."""
    embedded = whole.get_input_embeddings()(given["input_ids"])
    how = {name: given.get(name) for name in ("position_ids", "attention_mask", "past_key_values")}
    how |= {"config": whole.config, "inputs_embeds": embedded}
    if "input_embeds" in inspect.signature(masking_utils.create_causal_mask).parameters:  # 4.57
        how["input_embeds"] = how.pop("inputs_embeds")
        how["cache_position"] = torch.arange(embedded.shape[1])
    return {
        "full_attention": masking_utils.create_causal_mask(**how),
        "sliding_attention": masking_utils.create_sliding_window_causal_mask(**how),
    }


@contextmanager
def _rounded(whole: Any, rounding: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Apply a rounding to the result of every module that returns one tensor."""

    def hook(module: Any, args: Any, out: Any) -> Any:
        return rounding(out) if isinstance(out, Tensor) else None

    handles = [module.register_forward_hook(hook) for module in whole.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
