"""List entries of a `config.json` and folders that are refused, with the error expected of each."""

from functools import partial
from typing import Any

from llama_cases import SCALINGS, Case
from refusals.pure import Row

import sp_core as sp
from sp_core.llama import Checkpoint, LlamaConfig

SCALING = {"rope_type": "linear", "factor": 2.0}
UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    (
        "'mistral'.*`parallelize` computes causal language models .* in .*transformers.MODELS",
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    ),
    ("LlamaForSequenceClassification", {"architectures": ["LlamaForSequenceClassification"]}),
    ("architectures 5 is", {"architectures": 5}),
    ("partial_rotary_factor=0.5", {"partial_rotary_factor": 0.5}),
    *(
        ("partial_rotary_factor=0.5", {x: {"rope_type": "default", "partial_rotary_factor": 0.5}})
        for x in ("rope_parameters", "rope_scaling")
    ),
    ("attention_bias=True.*`parallelize` computes such", {"attention_bias": True}),
    ("is_causal=False", {"is_causal": False}),
    ("mlp_bias=True.*`parallelize` computes such", {"mlp_bias": True}),
    ("attention_dropout=0.1.* set it to 0 in config.json", {"attention_dropout": 0.1}),
    ("hidden_act='gelu'.*`parallelize` computes such", {"hidden_act": "gelu"}),
    ("quantization_config=", {"quantization_config": {"bits": 4}}),
    ("'dynamic'", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("lacks factor", {"rope_scaling": {"rope_type": "linear"}}),
    (r"rotary embedding is \[1\]", {"rope_scaling": [1]}),
    ("hidden_size='8' was given; pass a whole", {"hidden_size": "8", "head_dim": None}),
    ("lacks num_hidden_layers", {"num_hidden_layers": None}),
    ("vocab_size=0 was given; pass a whole number from 1", {"vocab_size": 0}),
    ("num_hidden_layers=True was given", {"num_hidden_layers": True}),
    ("rms_norm_eps=-0.5", {"rms_norm_eps": -0.5}),
    ("rms_norm_eps=True", {"rms_norm_eps": True}),
    ("multiple", {"num_key_value_heads": 4}),
    ("rms_norm_eps=inf", {"rms_norm_eps": float("inf")}),
    ("configuration is not supported", {"head_dim": 2**62}),
    ("even number", {"head_dim": 3}),
    ("rope_theta='big'", {"rope_theta": "big"}),
    ("eos_token_id='2'", {"eos_token_id": "2"}),
    (r"eos_token_id=\[1, True\]", {"eos_token_id": [1, True]}),
    ("bos_token_id='1' was given, needed a number", {"bos_token_id": "1"}),
    ("pad_token_id=True was given, needed a number", {"pad_token_id": True}),
    (
        r"per_layer_config={'0': {'rms_norm_eps': 0.5}} is not supported; only {} is",
        {"per_layer_config": {"0": {"rms_norm_eps": 0.5}}},
    ),
    ("tie_word_embeddings='no'", {"tie_word_embeddings": "no"}),
    *(  # the library transformers reads some of these entries only
        (r"contradict each other: .*'rope_scaling'.*Keep", entries)
        for entries in list[dict[str, Any]](
            [
                {"rope_scaling": {"rope_theta": 3.0}},
                {
                    "rope_theta": None,
                    "rope_scaling": SCALING,
                    "rope_parameters": {"rope_theta": 3.0},
                },
                {"rope_scaling": SCALING, "rope_parameters": {**SCALING, "factor": 3.0}},
                {"rope_scaling": {"rope_type": "default"}, "rope_parameters": SCALING},
                {"rope_scaling": SCALINGS["llama3"], "original_max_position_embeddings": 1024},
            ]
        )
    ),
]
"""A pattern of the error, and changes of the entries of 6 query heads and 3 of keys and values."""
ROWS: list[Row] = [
    *(
        row
        for read in list[Any]([LlamaConfig.from_folder, Checkpoint])
        for row in (
            (TypeError, "folder=None was given; pass a name or a Path", partial(read, None)),
            (sp.CheckpointError, "File name too long|has neither", partial(read, "n" * 300)),
        )
    ),
    *(
        (sp.CheckpointError, text, partial(LlamaConfig.from_dict, contents | changes))
        for contents in [Case((6, 3), layers=1).config.to_dict()]
        for text, changes in UNSUPPORTED
    ),
]
"""Wrong calls."""
