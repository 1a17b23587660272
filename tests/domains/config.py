"""Declare the domain of the byte tokenizer and of configurations: old and new `config.json`."""

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from llama_cases import SCALINGS
from oracle import reference

from domains.declared import Call, Parts, Subject, Values, judged, pure, same, spans, values
from sp_core.llama import LlamaConfig, Sampling, byte_tokenizer

Settings = dict[str, Any]


CONFIG: dict[str, Parts] = {
    "vocab_size": spans((300, 300), (1, 1), (32_000, 256_000)),
    "hidden_size": spans((64, 64), (1, 1), (4096, 16_384)),
    "intermediate_size": spans((90, 90), (1, 1), (11_008, 53_248)),
    "num_hidden_layers": spans((2, 2), (1, 1), (32, 126)),
    "num_key_value_heads": spans((4, 4), (1, 1), (5, 32)),
    "num_attention_heads": {
        "as many": lambda c, v: v["num_key_value_heads"],
        "a multiple": lambda c, v: v["num_key_value_heads"] * c.randint(2, 16),
    },
    "head_dim": {**values(16, 2, 256), "18 to 128": lambda c, v: 2 * c.randint(9, 64)},
    "rms_norm_eps": values(1e-6, 1e-5, 0.0),
    "rope_theta": values(10_000.0, 500_000.0, 1.0, 3.5),
    "rope_scaling": {
        name: (lambda c, v, scaling=scaling: scaling)  # type: ignore[misc]
        for name, scaling in SCALINGS.items()
    },
    "tie_word_embeddings": values(False, True),
    "max_position_embeddings": spans((2048, 2048), (1, 1), (131_072, 10_000_000)),
    "eos_token_id": values((), (2,), (128_001, 128_008, 128_009)),
    "bos_token_id": values(None, 1, 128_000),
    "pad_token_id": values(None, 0, 128_004),
}


def judge_fields(drawn: Values, config: LlamaConfig) -> None:
    """Check a configuration's fields, that a file keeps all of them, and the rotary angles."""
    assert all(getattr(config, name) == drawn[name] for name in CONFIG)
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    x = torch.randn(
        1, 3, 2, config.head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    frequencies = reference.llama_frequencies(
        config.head_dim, config.rope_theta, config.rope_scaling
    )
    positions = [0, 7, 1000]
    torch.testing.assert_close(
        config.rope().apply(x, positions),
        reference.rotate(x, positions, frequencies)
        * reference.llama_amplitude(config.rope_scaling),
        rtol=0,
        atol=1e-10,
    )


SCALING = {"rope_type": "linear", "factor": 4.0}
OLD_SCALING = {"rope_scaling": {"type": "linear", "factor": 4.0}}
BOTH = {"rope_theta": 5e5, "rope_scaling": SCALING}
NULLS: dict[str, Any] = {
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}
SEVEN = {"rope_theta": 7.0, "rope_scaling": SCALING}
SAID_SEVEN: dict[str, Settings] = {
    "one entry": {**NULLS, "rope_parameters": {**SCALING, "rope_theta": 7.0}},
    "the old entry alone": {"rope_theta": None, "rope_scaling": {**SCALING, "rope_theta": 7.0}},
    "a default beside it": {
        **SEVEN,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    },
    "a length that the scaling lacks": {**SEVEN, "original_max_position_embeddings": 7},
}
"""By part: entries that mean SEVEN."""
HEADS = {"num_key_value_heads": 8, "head_dim": 12}
PLAIN = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048}
SUPPORTED: Settings = {"attention_bias": False, "attention_dropout": 0.0, "is_causal": True}

MEANINGS: dict[str, dict[str, tuple[Settings, Settings, tuple[str, ...]]]] = {
    "values.rope": {
        "two entries": (BOTH, BOTH, ()),
        "type": (OLD_SCALING, OLD_SCALING, ()),
        "default": ({"rope_scaling": {"rope_type": "default"}}, {"rope_scaling": None}, ()),
        "nulls": (NULLS, {"rope_theta": 1e4, "rope_scaling": None}, ()),
        **{name: (said, SEVEN, ()) for name, said in SAID_SEVEN.items()},
        "missing": ({}, {"rope_theta": 1e4, "rope_scaling": None}, ("rope_theta", "rope_scaling")),
    },
    "values.heads": {
        "given": ({}, {}, ()),
        "no num_key_value_heads": ({}, {"num_key_value_heads": 8}, ("num_key_value_heads",)),
        "no head_dim": ({}, {"head_dim": 12}, ("head_dim",)),
        "null": (dict.fromkeys(HEADS), HEADS, ()),
    },
    "values.eos": {
        "a list": ({"eos_token_id": [5, 6]}, {"eos_token_id": (5, 6)}, ()),
        "a number": ({"eos_token_id": 7}, {"eos_token_id": (7,)}, ()),
        "null": ({"eos_token_id": None}, {"eos_token_id": ()}, ()),
        "missing": ({}, {"eos_token_id": ()}, ("eos_token_id",)),
    },
    "values.more": {
        "nothing": ({}, {}, ()),
        "supported settings": (SUPPORTED, {}, ()),
        "unknown settings": ({"use_cache": True}, {}, ()),
        "null": ({"tie_word_embeddings": None}, {"tie_word_embeddings": False}, ()),
        "no settings of a layer": ({"per_layer_config": {}}, {}, ()),
        "null for settings of a layer": ({"per_layer_config": None}, {}, ()),
        "defaults missing": ({}, PLAIN, (*PLAIN, "architectures", "hidden_act")),
    },
}
"""By factor and part: entries of the file, the fields that they mean, and entries left out."""


def written(config: LlamaConfig, drawn: Values) -> tuple[Settings, Settings]:
    """Return the contents of a `config.json`, and the fields that its drawn entries mean."""
    contents, meant, missing = config.to_dict(), Settings(), list[str]()
    for factor, parts in MEANINGS.items():
        said, fields, lacking = parts[drawn[factor]]
        contents, meant, missing = contents | said, meant | fields, [*missing, *lacking]
    return {name: value for name, value in contents.items() if name not in missing}, meant


@contextmanager
def from_folder(_: Any, drawn: Values) -> Iterator[Call]:
    """Yield the call of `from_folder` on a `config.json` as other programs write it."""
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=96,
        intermediate_size=7,
        num_hidden_layers=Random(drawn["seed"]).randint(1, 9),
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=20,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    contents, meant = written(config, drawn)
    wanted = LlamaConfig(**{**{name: getattr(config, name) for name in CONFIG}, **meant})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(contents), encoding="utf-8")
        given = {"folder": drawn["folder.type"](folder)}
        assert LlamaConfig.from_dict(contents) == wanted
        yield Call(LlamaConfig.from_folder, given, partial(same, wanted=wanted))


def tokenized(drawn: Values) -> Call:
    """Return the call that makes a tokenizer."""
    return Call(byte_tokenizer, {}, partial(judge_tokenizer, drawn["(text)"]))


def judge_tokenizer(text: str, tokenizer: Any) -> None:
    """Check that a tokenizer encodes a text to its bytes, and decodes these to the text."""
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.get_vocab_size() == 256


SAMPLING: dict[str, Parts] = {
    "temperature": values(0.0, 1.0, 50.0, 1e-310),
    "top_k": {**values(None, 1, 10_000), "2 to 7": lambda c, v: c.randint(2, 7)},
    "top_p": {**values(None, 1.0, 1e-12), "0.3 to 0.9": lambda c, v: c.uniform(0.3, 0.9)},
    "seed": {**values(0, 10**18, -7), "1 to 99": lambda c, v: c.randint(1, 99)},
}
"""Parts of the parameters of `Sampling`, in the order of its constructor."""


def sampled(drawn: Values) -> Call:
    """Return the call that chooses a token from logits."""
    sampling = Sampling(*(drawn[name] for name in SAMPLING))
    random = sampling.random(drawn["prompt"])
    noise = torch.Generator().manual_seed(drawn["seed"] % 2**16)
    x = torch.randn(drawn["logits.size"], generator=noise, dtype=torch.float64)
    made = {
        "normal": x,
        "large": x * 1e4,
        "equal": torch.ones_like(x),
        "some -inf": x.where(x > 0, -torch.inf),
    }
    logits = made[drawn["logits.values"]].to(getattr(torch, drawn["logits.dtype"]))
    logits[0] = 1.0  # so that at least one token is possible
    if drawn["random"] == "used":
        torch.rand((), generator=random)
    given = {"logits": logits, "random": random}
    return Call(
        sampling.choose, given, partial(judge_choice, sampling, given, random.clone_state())
    )


def judge_choice(sampling: Sampling, given: Values, random: torch.Generator, token: int) -> None:
    """Compare a choice with the first token at which the summed probabilities exceed the draw."""
    logits = [float(x) for x in given["logits"]]
    order = sorted(range(len(logits)), key=lambda place: (-logits[place], place))
    if sampling.temperature == 0:
        assert token == order[0]
        return
    order = order[: sampling.top_k]
    weights = [
        math.exp((logits[place] - logits[order[0]]) / sampling.temperature) for place in order
    ]
    sums = [math.fsum(weights[: n + 1]) for n in range(len(weights))]
    if sampling.top_p is not None:
        sums = sums[
            : 1 + next(n for n, total in enumerate(sums) if total >= sampling.top_p * sums[-1])
        ]
    drawn = float(torch.rand((), generator=random, dtype=torch.float64)) * sums[-1]
    assert token == order[next(n for n, total in enumerate(sums) if total > drawn)]


SUBJECTS = [
    judged(
        "llama.LlamaConfig",
        LlamaConfig,
        CONFIG,
        judge_fields,
        covers=("llama.LlamaConfig.rope", "llama.LlamaConfig.to_dict"),
    ),
    Subject(
        "llama.LlamaConfig.from_folder",
        {
            "folder.type": {"Path": lambda c, v: Path, "str": lambda c, v: str},
            **{factor: values(*parts) for factor, parts in MEANINGS.items()},
        },
        from_folder,
        lambda _: 1,
        covers=("llama.LlamaConfig.from_dict",),
    ),
    pure(
        "llama.byte_tokenizer",
        {
            "(text)": {
                "ascii": lambda c, v: "def f(x): return 2 * x",
                "empty": lambda c, v: "",
                "spaces and lines": lambda c, v: "  a\t\n\r\n  b ",
                "control characters": lambda c, v: "".join(map(chr, range(128))),
                "other scripts": lambda c, v: "für \u4e16\u754c \U0001f469\u200d\U0001f52c",
                "any": lambda c, v: "".join(
                    chr(c.choice([c.randrange(0xD800), c.randrange(0xE000, 0x110000)]))
                    for _ in range(60)
                ),
            }
        },
        tokenized,
    ),
    pure(
        "llama.Sampling.choose",
        SAMPLING
        | {
            "logits.size": spans((5, 9), (1, 1), (1000, 2000)),
            "logits.values": values("normal", "large", "equal", "some -inf"),
            "logits.dtype": values("float64", "float32", "bfloat16"),
            "random": values("fresh", "used"),
            "prompt": spans((0, 0), (1, 1000)),
        },
        sampled,
        covers=("llama.Sampling", "llama.Sampling.random"),
        together=tuple(
            {"temperature": "1e-310", "logits.values": name} for name in ("normal", "equal")
        ),
    ),
]
