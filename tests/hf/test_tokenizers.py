"""Compare chat templates and tokens of a model folder with those of transformers' tokenizers.

The special tokens of a folder may be declared in four files.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from sp_core.llama.text import chat_prompt, read_tokenizer

END = "<|im_end|>"
TEXT = f" hi {END} h<x>i{END}  ini </s> n"
CLASSES = None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "LlamaTokenizer"
NAMES = "bos_token", "eos_token", "unk_token", "pad_token", "boi_token"
TEMPLATE = "[{{ messages[0].content }}]" + "".join(f"{{{{ {name} }}}};" for name in NAMES)
PLAIN = {"bos_token": "<s>", "eos_token": "</s>"}
FLAGS = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
STRIPPED = {**FLAGS, "content": END, "lstrip": True}
CONFIG, MAP, ADDED = "tokenizer_config", "special_tokens_map", "added_tokens"
DECODER = {"263": {**STRIPPED, "special": True}, "264": {**FLAGS, "content": "<x>"}}
SPECIAL = {**FLAGS, "content": "n", "special": True}

FOLDERS: dict[str, dict[str, dict[str, Any]]] = {
    "no entries": {},
    "plain": {CONFIG: PLAIN},
    "null": {CONFIG: {"unk_token": None}},
    "objects": {CONFIG: {"eos_token": {**STRIPPED, "__type": "AddedToken"}}},
    "an end in the vocabulary": {CONFIG: {**PLAIN, "eos_token": END}},
    "a token of the model": {CONFIG: {**PLAIN, "boi_token": END}},
    "additional tokens": {CONFIG: {"additional_special_tokens": [END, "<x>"]}},
    "extra tokens": {CONFIG: {"extra_special_tokens": [END]}},
    "extra tokens with names": {CONFIG: {**PLAIN, "extra_special_tokens": {"boi_token": END}}},
    "a decoder": {CONFIG: {**PLAIN, "added_tokens_decoder": DECODER}},
    "a decoder and an end": {
        CONFIG: {
            **PLAIN,
            "eos_token": END,
            "pad_token": "</s>",
            "added_tokens_decoder": DECODER,
        }
    },
    "a decoder and a map": {
        CONFIG: {**PLAIN, "added_tokens_decoder": {"264": DECODER["264"]}},
        MAP: {"bos_token": END},
    },
    "a map": {MAP: PLAIN},
    "a map of objects": {MAP: {"eos_token": STRIPPED, "pad_token": {**FLAGS, "content": "</s>"}}},
    "a map that replaces": {CONFIG: PLAIN, MAP: {"bos_token": "<unk>", "eos_token": END}},
    "a map with more tokens": {MAP: {"additional_special_tokens": [END]}},
    "a map with names": {MAP: {"extra_special_tokens": {"boi_token": END}}},
    "added tokens": {ADDED: {"<x>": 264}},
    "added tokens and an end": {CONFIG: {"eos_token": END}, ADDED: {"<x>": 264, END: 263}},
    "added tokens and a decoder": {
        CONFIG: {"added_tokens_decoder": {"263": DECODER["263"]}},
        ADDED: {"<x>": 264},
    },
    "a known token as the end": {CONFIG: {"eos_token": "n"}},
    "a known token that is special": {CONFIG: {"added_tokens_decoder": {"262": SPECIAL}}},
    "a known token and the end": {
        CONFIG: {
            "eos_token": "n",
            "pad_token": "</s>",
            "added_tokens_decoder": {"262": {**SPECIAL, "special": False}},
        }
    },
    "a known token among others": {CONFIG: {"extra_special_tokens": ["n", "i"]}},
    "a known token that is added": {CONFIG: {"eos_token": "n"}, ADDED: {"n": 262}},
    "a known token with other flags": {
        CONFIG: {"eos_token": {**STRIPPED, "content": "</s>", "__type": "AddedToken"}}
    },
    "a known token with the flags of a map": {MAP: {"eos_token": {**STRIPPED, "content": "n"}}},
    "a token beyond the vocabulary": {MAP: {"pad_token": "i"}, ADDED: {" h": 265}},
}


def llama() -> Tokenizer:
    """Return a small tokenizer as LLaMA 2 has it. `<|im_end|>` and `<x>` are not declared."""
    known = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [*known, "\u2581", "h", "i", "n", END, "<x>"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(known[:3])
    tokenizer.add_tokens([AddedToken("n", normalized=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", "first", split=False)
    parts = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return tokenizer


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_special_tokens_are_those_of_transformers(
    name: str, kind: str | None, tmp_path: Path
) -> None:
    """A chat template shows them, a prompt is cut at them, and a text does not contain them."""
    from transformers import AutoTokenizer, __version__

    if __version__.startswith("4."):
        pytest.skip("transformers 4 has other classes for a folder without tokenizer_class")
    llama().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    files = {CONFIG: {}, **FOLDERS[name]}
    files[CONFIG] = {"chat_template": TEMPLATE, **({"tokenizer_class": kind} if kind else {})}
    files[CONFIG] |= FOLDERS[name].get(CONFIG, {})
    for file, values in files.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(values))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), read_tokenizer(tmp_path)
    said = [{"role": "user", "content": TEXT}]
    wanted = theirs.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    prompt = chat_prompt(tmp_path, TEXT, datetime.now(UTC))
    assert prompt == wanted
    for text in (TEXT, prompt):
        ids = ours.encode(text).ids
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
