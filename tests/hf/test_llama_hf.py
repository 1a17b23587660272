"""Against Hugging Face's LLaMA with random weights, from a folder that it has saved itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_cases import SCALINGS, Case
from torch import Tensor

import sp_core as sp
from sp_core.llama import create, generate, load
from sp_core.llama import save as save_ours
from sp_core.testing import record_ratio, reference, run_threads
from sp_core.testing.tolerance import bound, check_close

CASES = {
    "8/2, llama3": Case((8, 2), hidden=32, ffn=22, vocab=37, scaling="llama3", dtype="float32", seed=1),
    "6/3, linear, tied, odd vocabulary": Case(
        (6, 3), hidden=24, ffn=17, vocab=41, scaling="linear", tied=True, dtype="float32", seed=2
    ),
    "5/1": Case((5, 1), hidden=20, ffn=30, vocab=23, dtype="float32", seed=3),
}
GRIDS = dict(zip(CASES, [({"tp": 1}, {"tp": 3}), ({"tp": 2}, {"ulysses": 2, "tp": 2}), ({"tp": 4}, {"ring": 3})], strict=True))
SEQ_LEN = 33


def save(case: Case, folder: Path) -> Any:
    """A model of transformers with our weights, saved in several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = SCALINGS[case.scaling] or {"rope_type": "default"}
    config = LlamaConfig(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        intermediate_size=case.ffn,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads[0],
        num_key_value_heads=case.heads[1],
        head_dim=case.head_dim,
        max_position_embeddings=128,
        tie_word_embeddings=case.tied,
        rope_parameters={"rope_theta": 100.0, **scaling},
        attn_implementation="sdpa",  # the eager one takes its softmax in float32, too
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    missing = model.load_state_dict({name: value.float() for name, value in case.weights().items()}, strict=False)
    assert missing.missing_keys == (["lm_head.weight"] if case.tied else [])
    assert missing.unexpected_keys == []
    model.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


def without_casts(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """RMSNorm and rotary angles in float64, which transformers computes in float32 whatever the model's dtype."""
    from transformers.models.llama import modeling_llama as theirs

    def norm(self: Any, x: Tensor) -> Tensor:
        scaled: Tensor = self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return scaled

    def rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = torch.tensor(reference.llama_frequencies(case.head_dim, 100.0, SCALINGS[case.scaling]), dtype=torch.float64)
        torch.testing.assert_close(self.inv_freq.double(), frequencies, rtol=1e-6, atol=0)
        angles = (position_ids[..., None].double() * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(theirs.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(theirs.LlamaRotaryEmbedding, "forward", rotary)


def ours(comm: Any, folder: Path, grid: dict[str, int], tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[list[int]]]:
    """All logits, and what is generated, on every rank."""
    with sp.Mesh(comm, check="off", **grid) as mesh, torch.no_grad():
        model = load(folder, mesh, dtype=dtype)
        sequence, tensor = model.grid.sequence, model.grid.tensor
        sharding = sp.Sharding.zigzag(SEQ_LEN, sequence.size)
        local = model(sharding.shard(tokens, sequence.rank, 1), sharding=sharding)
        rows = sp.all_gather(sp.all_gather(local, comm=tensor, dim=2), comm=sequence, dim=1, sizes=sharding.lengths)
        return sharding.restore(rows, 1), generate(model, [tokens[0, :5].tolist()], max_tokens=8)


@pytest.mark.parametrize("name", sorted(CASES))
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 to the elementwise bound; float32 as close to float64 as theirs; and the same greedy tokens."""
    case = CASES[name]
    tokens = case.tokens(1, SEQ_LEN)
    model = save(case, tmp_path).eval()
    with torch.no_grad():
        single = model(tokens).logits
        without_casts(monkeypatch, case)
        double = model.double()(tokens).logits
        seen = torch.ones(1, 5, dtype=torch.int64)
        greedy = model.generate(tokens[:, :5], attention_mask=seen, max_new_tokens=8, do_sample=False, pad_token_id=0)[
            0, 5:
        ].tolist()
    weights = case.weights()

    def run(rounding: Any, *values: Tensor) -> tuple[Tensor]:
        return (reference.llama(tokens, dict(zip(weights, values, strict=True)), rounding=rounding, **case.options()),)

    (want,), (scale,) = reference.sensitivity(run, list(weights.values()))
    check_close("transformers", double, want, bound(scale, torch.float64))
    for grid in GRIDS[name]:
        size = math.prod(grid.values())
        for dtype in (torch.float64, torch.float32):
            logits, tokens_of_ranks = run_threads(size, lambda comm, g=grid, d=dtype: ours(comm, tmp_path, g, tokens, d))[0]
            record_ratio("llama transformers", check_close("logits", logits, want, bound(scale, dtype)))
            if dtype == torch.float64:
                assert tokens_of_ranks == [greedy]
            else:
                error, theirs = (float((x - want).square().mean().sqrt()) for x in (logits, single))
                assert error <= 2 * theirs  # two draws of one size: which is the smaller one is chance


@pytest.mark.parametrize("name", sorted(CASES))
def test_transformers_reads_what_four_ranks_have_saved(name: str, tmp_path: Path) -> None:
    """In several files; its logits are those of the reference with these weights, as near as its casts to float32 let them."""
    from transformers import AutoModelForCausalLM

    case = CASES[name]
    tokens = case.tokens(1, SEQ_LEN)

    def write(comm: Any) -> None:
        with sp.Mesh(comm, tp=4) as mesh:
            save_ours(create(case.config, mesh, seed=7, dtype=torch.float64), tmp_path / "model", max_file_bytes=8000)

    run_threads(4, write)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="sdpa").eval()
    assert model.dtype == torch.float64
    with torch.no_grad():
        want = reference.llama(tokens, model.state_dict(), **case.options())
        torch.testing.assert_close(model(tokens).logits, want, rtol=1e-5, atol=1e-6)
    assert float(want.std()) > 0.01
