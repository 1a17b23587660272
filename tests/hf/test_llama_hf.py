"""Compare our LLaMA with Hugging Face's, loaded from its folder, on meshes of up to 4 ranks."""

import json
import math
import statistics
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from llama_cases import MESHES, SCALINGS, Case
from oracle import reference
from oracle.ways import CHOICES
from torch import Tensor

import sp_core as sp
from hf.cases import InFloat64
from sp_core.llama import Llama, LlamaConfig, create, generate, load, save as save_ours
from sp_core.llama.train import backward
from sp_core.nn.gradients import placement_of
from sp_core.testing import record_ratio, run_threads
from sp_core.testing.tolerance import bound, check_close

CASES = {
    "8/2, llama3": Case(
        (8, 2), hidden=32, ffn=22, vocab=37, scaling="llama3", dtype="float32", seed=1
    ),
    "6/3, linear, tied, odd vocabulary": Case(
        (6, 3), hidden=24, ffn=17, vocab=41, scaling="linear", tied=True, dtype="float32", seed=2
    ),
    "5/1": Case((5, 1), hidden=20, ffn=30, vocab=23, dtype="float32", seed=3),
    "4/4, yarn": Case(
        (4, 4), hidden=16, ffn=18, vocab=29, head_dim=8, scaling="yarn", dtype="float32", seed=4
    ),
}
TABLE = [mesh for size in sorted(MESHES) for mesh in MESHES[size]]
BATCH, SEQ_LEN, NEW = 8, 33, 64
PROMPTS = (5, 1, 3, 8)
"""Lengths of the prompts, which are the first tokens of the first sequences."""


def made(case: Case, **more: object) -> Any:
    """Return a model of transformers with the weights of a case, and `more` as configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

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
        rope_theta=case.theta,
        rope_scaling=copy(SCALINGS[case.scaling]),  # transformers 5 makes `rope_parameters` of it
        attn_implementation="sdpa",  # the eager one takes its softmax in float32, too
        bos_token_id=None,
        eos_token_id=None,
        **more,
    )
    model = LlamaForCausalLM(config)
    missing = model.load_state_dict(
        {name: value.float() for name, value in case.weights().items()}, strict=False
    )
    assert missing.missing_keys == (["lm_head.weight"] if case.tied else [])
    assert missing.unexpected_keys == []
    return model.eval()


class Theirs(NamedTuple):
    """A saved model, the reference's logits of its tokens, and transformers' answers to prompts."""

    case: Case
    folder: Path
    tokens: Tensor
    want: reference.Reference
    prompts: list[list[int]]
    greedy: list[list[int]]


def check(logits: Tensor, want: reference.Reference, dtype: torch.dtype) -> float:
    """Compare logits elementwise with the reference; return the greatest error over its bound."""
    allowed = bound(want.scales["logits"], dtype)
    return check_close("logits", logits, want.values["logits"], allowed)


@pytest.fixture(scope="module", params=sorted(CASES))
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    """Save a model of transformers. Wholly in float64, its logits are those of the reference."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("model")
    tokens, weights = case.tokens(BATCH, SEQ_LEN), case.weights()

    def run(rounding: Any, leaves: dict[str, Tensor]) -> tuple[None, dict[str, Tensor]]:
        logits = reference.llama(tokens, leaves, rounding=rounding, **case.options())
        return None, {"logits": logits}

    want = reference.sensitivity(run, weights)
    made(case).save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    prompts = [row[:length].tolist() for row, length in zip(tokens, PROMPTS, strict=False)]
    with torch.no_grad(), InFloat64():
        model = made(case).double()
        check(model(tokens).logits, want, torch.float64)
        greedy = [continued(model, torch.tensor([prompt])) for prompt in prompts]
    assert any(len(set(tokens)) > 5 for tokens in greedy)  # not the same few tokens again and again
    return Theirs(case, folder, tokens, want, prompts, greedy)


def continued(model: Any, prompt: Tensor) -> list[int]:
    """Return the tokens that transformers generates greedily after a prompt."""
    how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    rows = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
    tokens: list[int] = rows[0, prompt.shape[1] :].tolist()
    return tokens


def axes(mesh: dict[str, int]) -> dict[str, Any]:
    return {axis: size for axis, size in mesh.items() if size > 1} or {"tp": 1}


def gathered(model: Llama, tokens: Tensor) -> Tensor:
    """Return the logits of all tokens, on every rank."""
    grid = model.grid
    sharding = sp.Sharding.zigzag(SEQ_LEN, grid.sequence.size)
    rows = tokens.tensor_split(grid.replicas.size)[grid.replicas.rank]
    local = model(sharding.shard(rows, grid.sequence.rank, 1), sharding=sharding)
    shards = sp.all_gather(
        sp.all_gather(local, comm=grid.tensor, dim=2),
        comm=grid.sequence,
        dim=1,
        sizes=sharding.lengths,
    )
    return sp.all_gather(sharding.restore(shards, 1), comm=grid.replicas)


LINEAR = {"rope_type": "linear", "factor": 2.0}
OLD = {"type": "linear", "factor": 2.0, "attention_factor": None}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 50.0},
    {"rope_theta": 50.0, "rope_scaling": LINEAR},
    {"rope_parameters": LINEAR},
    {"rope_theta": 50.0, "rope_parameters": LINEAR},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    {"rope_parameters": {"rope_theta": 50.0}, "rope_scaling": {**LINEAR, "rope_theta": 50.0}},
    {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LINEAR},
    {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": LINEAR},
    {"rope_scaling": {**LINEAR, "rope_theta": 50.0}},
    {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": OLD, "rope_parameters": {**LINEAR, "rope_theta": 1e4}},
    {"rope_scaling": LINEAR, "original_max_position_embeddings": 32},
    *(
        {"rope_theta": 1e4, name: scaling, **length}
        for name in ("rope_scaling", "rope_parameters")
        for scaling in (YARN, LLAMA3)
        for length in ({}, {"original_max_position_embeddings": 32})
    ),
]


@pytest.mark.parametrize("entries", ROPES, ids=repr)
def test_entries_of_the_rotary_embedding_mean_what_they_do_for_transformers(
    entries: dict[str, Any], tmp_path: Path
) -> None:
    """A model's `config.json` can have them in three places."""
    from transformers import AutoConfig, __version__
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    if __version__.startswith("4."):
        pytest.skip("transformers 4 does not read rope_parameters")
    values = CASES["5/1"].config.to_dict()
    values = {name: x for name, x in values.items() if not name.startswith("rope")} | entries
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    ours = LlamaConfig.from_folder(tmp_path).rope().frequencies
    torch.testing.assert_close(theirs.double(), ours, rtol=1e-6, atol=0)


ENTRIES: list[dict[str, Any]] = [
    {"is_causal": False},
    {"is_causal": True},
    {"is_decoder": False},
    {"is_decoder": True},
    {"is_encoder_decoder": True},
    {"use_bidirectional_attention": True},
    {"use_cache": False},
    {"attention_chunk_size": 4},
    {"sliding_window": 4},
    {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
    {"qk_norm": True},
    {"pretraining_tp": 2},
    {"attention_multiplier": 0.5, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    {"final_logit_softcapping": 1.0},
    {"no_rope_layers": [0, 1]},
    {"hidden_act": "gelu"},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"partial_rotary_factor": 0.5},
    {"rms_norm_eps": 0.1},
    {"rope_theta": 50.0},
    {"head_dim": 6},
]


@pytest.mark.parametrize("entries", ENTRIES, ids=repr)
def test_an_entry_that_transformers_obeys_is_obeyed_or_refused(entries: dict[str, Any]) -> None:
    """Entries with which a model of transformers has other logits change ours, or are refused."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def logits(values: dict[str, Any]) -> Tensor:
        config = AutoConfig.for_model(**values)
        model = AutoModelForCausalLM.from_config(config).eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for x in model.parameters():
                x.copy_(torch.randn(x.shape, generator=generator) * 0.4)
            found: Tensor = model(torch.arange(1, 12)[None]).logits
        return found

    plain = CASES["5/1"].config.to_dict()
    is_other = not torch.allclose(logits(plain), logits(plain | entries))
    try:
        read = LlamaConfig.from_dict(plain | entries)
    except sp.CheckpointError:
        return
    assert (read != LlamaConfig.from_dict(plain)) == is_other


on_every_mesh = pytest.mark.parametrize(
    "mesh",
    TABLE,
    ids=lambda mesh: " x ".join(f"{axis} {size}" for axis, size in axes(mesh).items()),
)


@on_every_mesh
def test_logits_are_those_of_transformers(theirs: Theirs, mesh: dict[str, int]) -> None:
    """All algorithms agree within the elementwise bound, with and without TP-SP."""
    size = math.prod(mesh.values())

    def body(comm: Any, algorithm: str, tp_sp: bool, dtype: torch.dtype) -> Tensor:
        with sp.Mesh(comm, check="off", algorithm=algorithm, **axes(mesh)) as made, torch.no_grad():
            return gathered(load(theirs.folder, made, dtype=dtype, tp_sp=tp_sp), theirs.tokens)

    for algorithm in CHOICES:
        for tp_sp in (False, True)[: 1 + (mesh["tp"] > 1)]:
            for dtype in (torch.float64, torch.float32):
                logits = run_threads(
                    size,
                    lambda comm, how=(algorithm, tp_sp, dtype): body(comm, *how),  # type: ignore[misc]
                )[0]
                record_ratio("llama transformers", check(logits, theirs.want, dtype))


DRAWS, STUDENT = 10, 4.297
"""Models for each case, and the quantile 0.999 of Student's t distribution for as many samples."""


@cache
def drawn(name: str) -> tuple[list[Case], list[float], float]:
    """Return models, the log errors of transformers, and the standard deviation that chance causes.

    The attentions "eager" and "sdpa" of transformers add in different orders. The deviation is that
    of the difference between their log errors.
    """
    models, errors, apart = [], [], []
    for number in range(DRAWS):
        case = replace(CASES[name], seed=CASES[name].seed + 100 * number)
        model, tokens = made(case), case.tokens(BATCH, SEQ_LEN)
        with torch.no_grad():
            errors.append(log_error(case, model(tokens).logits))
            model.set_attn_implementation("eager")
            apart.append(log_error(case, model(tokens).logits) - errors[-1])
        models.append(case)
    return models, errors, statistics.stdev(apart)


def log_error(case: Case, logits: Tensor) -> float:
    """Return the logarithm of the root mean square error of logits against float64."""
    return float((logits - case.logits(case.tokens(BATCH, SEQ_LEN))).square().mean().log()) / 2


@on_every_mesh
@pytest.mark.parametrize("name", sorted(CASES))
def test_float32_is_no_farther_from_float64_than_transformers(
    name: str, mesh: dict[str, int]
) -> None:
    """The mean error over several models is not larger than chance explains.

    For a single model, the order of additions decides by chance whose error is smaller.
    """
    models, errors, apart = drawn(name)

    def body(comm: Any) -> list[Tensor]:
        with sp.Mesh(comm, check="off", **axes(mesh)) as found, torch.no_grad():
            return [gathered(one.model(found), one.tokens(BATCH, SEQ_LEN)) for one in models]

    ours = map(log_error, models, run_threads(math.prod(mesh.values()), body)[0])
    farther = statistics.mean(ours) - statistics.mean(errors)
    assert farther <= STUDENT * apart / math.sqrt(DRAWS)


@pytest.mark.parametrize("number", range(len(TABLE)), ids=lambda number: f"mesh {number}")
def test_greedy_tokens_are_those_of_transformers(theirs: Theirs, number: int) -> None:
    """The first 64 tokens after four prompts of different lengths are equal in float64.

    Each mesh is tried with one of the algorithms, and every second one with TP-SP.
    """
    mesh, algorithm = TABLE[number], CHOICES[number % len(CHOICES)]
    size = math.prod(mesh.values())

    def body(comm: Any) -> list[list[int]]:
        with sp.Mesh(comm, check="off", algorithm=algorithm, **axes(mesh)) as made:
            model = load(theirs.folder, made, dtype=torch.float64, tp_sp=number % 2 == 0)
            return generate(model, theirs.prompts, max_tokens=NEW)

    assert run_threads(size, body) == [theirs.greedy] * size


@pytest.mark.parametrize("name", sorted(CASES))
def test_transformers_reads_what_four_ranks_have_saved(name: str, tmp_path: Path) -> None:
    """The checkpoint has several files.

    The logits equal those of the reference, up to the casts to float32 in transformers.
    """
    from transformers import AutoModelForCausalLM

    case = replace(CASES[name], eps=0)  # which transformers reads as a float only
    tokens = case.tokens(1, SEQ_LEN)

    def write(comm: Any) -> None:
        with sp.Mesh(comm, tp=4) as mesh:
            save_ours(
                create(case.config, mesh, seed=7, dtype=torch.float64),
                tmp_path / "model",
                max_file_bytes=8000,
            )

    run_threads(4, write)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="sdpa", dtype="auto"
    ).eval()
    assert model.dtype == torch.float64
    with torch.no_grad():
        want = reference.llama(tokens, model.state_dict(), **case.options())
        torch.testing.assert_close(model(tokens).logits, want, rtol=1e-5, atol=1e-6)
        assert model.generate(tokens[:, :5], max_new_tokens=9, do_sample=False).shape == (1, 14)
    assert float(want.std()) > 0.01


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"ring": 2}])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pad", [None, 0, 5, 22, -1])
def test_gradients_are_those_of_transformers_if_a_token_also_pads(
    pad: int | None, tied: bool, mesh: dict[str, Any], tmp_path: Path
) -> None:
    """The embedding of that token gets none, also where the token is a part of the text."""
    case = replace(CASES["5/1"], tied=tied)
    theirs, row = made(case, pad_token_id=pad), torch.tensor([[1, 5, 22, 7, 0, 3, 5, 0, 22, 4]])
    theirs.save_pretrained(tmp_path)
    theirs(input_ids=row, labels=row).loss.backward()
    wanted = {name.removeprefix("model."): x.grad for name, x in theirs.named_parameters()}

    def body(comm: Any) -> dict[str, Any]:
        with sp.Mesh(comm, **mesh) as found:
            model = load(tmp_path, found)
            backward(model, row.tolist())
            tensor = model.grid.tensor.rank
            return {
                name: (x.grad, placement_of(x).take(wanted[name], tensor))
                for name, x in model.named_parameters()
            }

    for found in run_threads(2, body):
        torch.testing.assert_close(*zip(*found.values(), strict=True), rtol=1e-4, atol=1e-5)
    assert tied or pad is None or not wanted["embed_tokens.weight"][pad].any()
