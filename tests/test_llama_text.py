"""Test chat templates, tokens that become text, and tokenizers of model folders."""

import io
import json
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from sp_core.errors import CheckpointError
from sp_core.llama import byte_tokenizer
from sp_core.llama.generate import _ends
from sp_core.llama.text import Stream, chat_prompt, read_stop_strings, read_tokenizer

pytestmark = pytest.mark.mpi_skip
FAMILY = "a \U0001f469 b"


NOW = datetime(2024, 2, 29, 7, 8, 9, tzinfo=UTC)
MESSAGE = "a < b & \u00fc"
SETTINGS: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "unk_token": None,
    "pad_token": {"content": 3},
    "mask_token": 5,
    "add_bos_token": True,
}


def chat(folder: Path, template: Any, **more: Any) -> str:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **more}))
    return chat_prompt(folder, MESSAGE, NOW)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[0].role }}: {{ messages[0].content }}", f"<s>user: {MESSAGE}"),
        (
            "{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ mask_token }}{{ add_bos_token }}",
            "</s>",
        ),
        (
            "{{ add_generation_prompt }} {{ tools is none }} {{ documents is none }}",
            "True True True",
        ),
        ("  {% if tools is none %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ strftime_now('%d %b %Y %H:%M:%S') }}", "29 Feb 2024 07:08:09"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{{ messages[0].content | tojson }}", f'"{MESSAGE}"'),
        ("{{ {'b': 1, 'a': [2]} | tojson }}", '{"b": 1, "a": [2]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ 'ü' | tojson(ensure_ascii=true) }}", '"\\u00fc"'),
    ],
)
def test_a_chat_template_has_the_names_that_transformers_gives_it(
    tmp_path: Path, template: str, text: str
) -> None:
    """Entries such as add_bos_token are no tokens. Of several templates the default is used."""
    both = [{"name": "tool", "template": "no"}, {"name": "default", "template": template}]
    for given in (template, both, [3, {"name": []}, *both, {}]):
        assert chat(tmp_path, given, **SETTINGS) == text


END = "<|im_end|>"
WITHOUT_FLAGS = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
OBJECT = {"content": END, **WITHOUT_FLAGS, "special": True}
LLAMA = {"tokenizer_class": "LlamaTokenizerFast"}
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


@pytest.mark.parametrize(
    ("config", "more", "text"),
    [
        ({}, {}, ""),
        ({}, {"bos_token": "<s>", "eos_token": OBJECT}, f"<s>{END}"),
        ({"bos_token": "<s>"}, {"bos_token": "<b>", "eos_token": None}, "<b>"),
        ({"bos_token": "<s>", "added_tokens_decoder": {}}, {"bos_token": "<b>"}, "<s>"),
        (LLAMA, {}, "<s></s>"),
        ({**LLAMA, "bos_token": None}, {"eos_token": END}, END),
        ({"extra_special_tokens": {"bos_token": "<b>"}}, {}, "<b>"),
        ({}, {"extra_special_tokens": {"eos_token": END}}, END),
        ({"extra_special_tokens": ["<b>"], "additional_special_tokens": 3}, {}, ""),
    ],
)
def test_a_template_shows_the_special_tokens_of_all_files(
    tmp_path: Path, config: dict[str, Any], more: dict[str, Any], text: str
) -> None:
    (tmp_path / MAP).write_text(json.dumps(more))
    assert chat(tmp_path, "{{ bos_token }}{{ eos_token }}", **config) == text


@pytest.mark.parametrize(
    ("files", "is_one", "shown"),
    [
        ({}, False, f"a{END}b"),
        ({CONFIG: {"eos_token": END}}, True, "ab"),
        ({CONFIG: {"eos_token": OBJECT}}, True, "ab"),
        ({CONFIG: {"additional_special_tokens": [3, END]}}, True, "ab"),
        ({CONFIG: {"extra_special_tokens": {"end": END}}}, True, "ab"),
        ({CONFIG: {"added_tokens_decoder": {"256": OBJECT, "3": None}}}, True, "ab"),
        ({CONFIG: {"added_tokens_decoder": {}}, ADDED: {END: 256}}, False, f"a{END}b"),
        ({MAP: {"pad_token": OBJECT}}, True, "ab"),
        ({ADDED: {END: 256}}, True, f"a{END}b"),
        ({ADDED: {END: 256}, MAP: {"eos_token": END}}, True, "ab"),
        ({ADDED: {"b": "?", END: 256}, CONFIG: {"added_tokens_decoder": 3}}, True, f"a{END}b"),
    ],
)
def test_a_prompt_is_cut_at_the_tokens_that_its_folder_declares(
    tmp_path: Path, files: dict[str, Any], is_one: bool, shown: str
) -> None:
    """Such a token of the vocabulary keeps its number. A text does not show the special ones."""
    model = json.loads(byte_tokenizer().to_str())
    model["model"]["vocab"][END] = 256
    for name, values in {"tokenizer.json": model, **files}.items():
        (tmp_path / name).write_text(json.dumps(values))
    tokenizer = read_tokenizer(tmp_path)
    ids = tokenizer.encode(f"a{END}b").ids
    assert ids == ([*b"a", 256, *b"b"] if is_one else [*f"a{END}b".encode()])
    assert tokenizer.decode([*b"a", 256, *b"b"]) == shown


def test_added_tokens_have_the_numbers_of_their_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    entries = {str(number): {"content": f"<{number}>"} for number in range(256, 1003)}
    (tmp_path / CONFIG).write_text(json.dumps({"added_tokens_decoder": entries}))
    assert read_tokenizer(tmp_path).encode("<300><999><1000>").ids == [300, 999, 1000]


def test_files_are_read_as_utf_8_in_any_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "text_encoding", lambda given, *_: given or "latin-1")
    for name, text in ((CONFIG, '{"bos_token": "ß"}'), ("chat_template.jinja", "é{{ bos_token }}")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert chat_prompt(tmp_path, "", NOW) == "éß"


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, r"tokenizer.json is not there.*\.save_pretrained\(DIR\)"),
        ({"tokenizer.json": "{}"}, "is broken"),
        *(
            ({"tokenizer.json": byte_tokenizer().to_str(), file: "["}, f"{file} cannot be read")
            for file in (CONFIG, MAP, ADDED)
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_used(tmp_path: Path, files: dict[str, str], text: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=text):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        None,
        3,
        {"default": "a"},
        [],
        ["a"],
        [{"name": "tool", "template": "a"}],
        [{"name": "default"}],
    ],
)
def test_a_folder_without_a_chat_template(tmp_path: Path, template: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"has no chat template: .* one of them named default"
    ):
        chat(tmp_path, template)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[1].content }}", "UndefinedError: .* has no element 1"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ raise_exception('Alternate roles!') }}", "TemplateError: Alternate roles!"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ range(10 ** 9) }}", "OverflowError"),
        ("{{ messages | tojson(3) }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_a_chat_template_that_fails(tmp_path: Path, template: str, text: str) -> None:
    """A template in a file of its own comes before that in `tokenizer_config.json`."""
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match=f"the chat template of the model fails: {text}"):
        chat(tmp_path, "good")


def test_a_stream_holds_back_half_a_character() -> None:
    tokenizer = byte_tokenizer()
    stream = Stream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode(FAMILY).ids]
    assert pieces == ["a", " ", "", "", "", "\U0001f469", " ", "b"]
    assert stream.rest() == ""
    stream.add(tokenizer.encode("\U0001f469").ids[0])
    assert stream.rest() == "\ufffd"


def test_a_stream_shows_the_text_of_all_tokens_together() -> None:
    """As that of LLaMA 2, this decoder leaves out the space before the first token."""
    tokenizer = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1}, "?"))
    tokenizer.decoder = decoders.Metaspace()
    stream = Stream(tokenizer)
    assert [stream.add(token) for token in (0, 1, 1, 0)] == ["a", " b", " b", " a"]


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
    with nullcontext() if texts is not None else pytest.raises(CheckpointError, match="has stop_s"):
        assert read_stop_strings(tmp_path) == texts


def test_a_prompt_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    """Such settings of the file are those of the training. The folder's name is not in UTF-8."""
    tokenizer, folder = byte_tokenizer(), tmp_path / "\udcff"
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    assert read_tokenizer(folder).encode("abc").ids == [*b"abc"]


def test_a_stop_string_may_have_any_length() -> None:
    tokens = [*b"stop " * 1000]
    for count in (5000, 4999):
        ends = _ends(tokens[:count], (), ["stop " * 1000], byte_tokenizer())
        assert ends == (count == 5000)
