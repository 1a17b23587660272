"""Test chat templates, tokens that become text, and tokenizers of model folders."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sp_core.errors import CheckpointError
from sp_core.llama import byte_tokenizer
from sp_core.llama.text import Stream, chat_prompt, read_stop_strings, read_tokenizer

pytestmark = pytest.mark.mpi_skip
FAMILY = "a \U0001f469 b"


def test_a_chat_template_sees_the_message_and_the_tokens_of_the_folder(tmp_path: Path) -> None:
    """Of several templates the default one is used. A template that fails is an error."""
    template = "{{ bos_token }}{{ messages[0].role }}: {{ messages[0].content }}{{ eos_token }}"
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": template}]
    for templates in (template, named):
        settings = {**tokens, "chat_template": templates}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert chat_prompt(tmp_path, "how?") == "<s>user: how?</s>"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[1].content }}")
    with pytest.raises(CheckpointError, match="the chat template of the model fails"):
        chat_prompt(tmp_path, "how?")


def test_a_stream_holds_back_half_a_character() -> None:
    tokenizer = byte_tokenizer()
    stream = Stream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode(FAMILY).ids]
    assert pieces == ["a", " ", "", "", "", "\U0001f469", " ", "b"]
    assert stream.rest() == ""
    stream.add(tokenizer.encode("\U0001f469").ids[0])
    assert stream.rest() == "\ufffd"


@pytest.mark.parametrize(
    ("said", "texts"),
    [
        (None, []),
        ({}, []),
        ({"stop_strings": None}, []),
        ({"stop_strings": "end"}, ["end"]),
        ({"stop_strings": ["a", "b"]}, ["a", "b"]),
        *(({"stop_strings": wrong}, None) for wrong in (["a", ""], ["a", 3], 3, {"a": "b"})),
    ],
)
def test_stop_strings_are_a_text_or_several(tmp_path: Path, said: Any, texts: Any) -> None:
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with nullcontext() if texts is not None else pytest.raises(CheckpointError, match="stop_str"):
        assert read_stop_strings(tmp_path) == texts


@pytest.mark.parametrize(
    ("content", "text"), [(None, "tokenizer.json is not there"), ("{}", "is broken")]
)
def test_a_tokenizer_that_cannot_be_used(tmp_path: Path, content: str | None, text: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=text):
        read_tokenizer(tmp_path)
