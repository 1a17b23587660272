"""Read a model folder's tokenizer, stop strings and chat template, and turn tokens into text.

The command line uses these functions. `byte_tokenizer` needs no folder. Nothing here communicates.
"""

import json
import sys
from collections.abc import Callable, Collection
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sp_core.errors import CheckpointError
from sp_core.llama.config import is_there, read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_CONFIG = "tokenizer_config.json"
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""Special tokens of a `LlamaTokenizer` whose folder has no entries for them."""
_FLAGS = "lstrip", "rstrip", "single_word", "normalized", "special"
_UNFINISHED = "\ufffd"  # the decoder writes this for bytes that are not yet a whole character


def read_tokenizer(folder: str | Path) -> "Tokenizer":
    """Return the tokenizer in `tokenizer.json` of a model folder.

    As in transformers, it gets the tokens that `tokenizer_config.json`, `special_tokens_map.json`
    and `added_tokens.json` declare. A declared token of the vocabulary keeps its number. Unlike in
    transformers, settings in `tokenizer_config.json`, such as add_prefix_space, are not read.

    Raises:
        CheckpointError: a file is missing or broken, or `tokenizers` is not installed.
    """
    path = Path(folder) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "prompts need tokenizers; install it with pip install 'sp-core[llama]'."
        ) from error
    if not is_there(path):
        raise CheckpointError(
            f"{path} is not there. Copy it from the folder of the model that this one was made of, "
            "or pass tokenizer= to sp_core.llama.save. To make it from a tokenizer.model, "
            "install transformers, sentencepiece and protobuf, and call "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())  # from_file takes UTF-8 paths only
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{path} is broken: {error}. Copy it again.") from error
    tokenizer.no_truncation()  # the file keeps both from the training of the model
    tokenizer.no_padding()
    tokenizer.add_tokens(_declared(folder, tokenizer.get_added_tokens_decoder().values()))
    return tokenizer


def _declared(folder: str | Path, known: "Collection[AddedToken]") -> "list[AddedToken]":
    """Return the tokens that a folder declares; `tokenizer.json` declares those of `known`.

    As in transformers, `added_tokens_decoder` replaces `added_tokens.json` and `known`.
    """
    from tokenizers import AddedToken

    named, others = _special_tokens(folder)
    entries = {text: x for x in (*named.values(), *others) if (text := _content(x))}
    special = {text: _flags(x) | {"special": True} for text, x in entries.items()}
    numbered = _entries(folder, _CONFIG).get("added_tokens_decoder")
    if isinstance(numbered, dict):
        ordered = [numbered[number] for number in sorted(numbered, key=_order)]
        tokens = {text: _flags(x) for x in ordered if (text := _content(x))}
    else:
        added = _entries(folder, "added_tokens.json")
        ordered = sorted(added, key=lambda text: _order(str(added[text])))
        tokens = {text: special.get(text, {}) for text in ordered}
        tokens |= {x.content: {name: getattr(x, name) for name in _FLAGS} for x in known}
    names = {_content(x) for x in named.values()}
    tokens = {text: x | {"special": True} if text in names else x for text, x in tokens.items()}
    rest = {text: x for text, x in special.items() if text not in tokens}
    return [AddedToken(text, **flags) for text, flags in (tokens | rest).items()]


def _order(number: str) -> tuple[int, str]:
    """Return a key that sorts texts of whole numbers as the numbers."""
    return len(number), number


def _flags(entry: Any) -> dict[str, bool]:
    """Return the settings of a token, whose entry is a text or an object."""
    return {name: bool(entry[name]) for name in _FLAGS if isinstance(entry, dict) and name in entry}


def _special_tokens(folder: str | Path) -> tuple[dict[str, Any], list[Any]]:
    """Return the special tokens of a folder, those with names and others: texts or objects.

    As in transformers, `added_tokens_decoder` replaces `special_tokens_map.json`.
    """
    config = _entries(folder, _CONFIG)
    is_llama = config.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast")
    named, others = dict[str, Any](_LLAMA if is_llama else {}), list[Any]()
    is_whole = "added_tokens_decoder" in config
    for entries in (config, {} if is_whole else _entries(folder, "special_tokens_map.json")):
        named |= {name: x for name, x in entries.items() if name.endswith("_token")}
        for name in ("extra_special_tokens", "additional_special_tokens"):
            more = entries.get(name)
            named |= more if isinstance(more, dict) else {}
            others += more if isinstance(more, list) else []
    return named, others


def _content(entry: object) -> str | None:
    """Return the text of a token, which is a text or an object; None if it has no text."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _entries(folder: str | Path, file: str) -> dict[str, Any]:
    """Return the JSON object in a file of a folder, {} if the file is not there."""
    path = Path(folder) / file
    return read_json(path) if is_there(path) else {}


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, with its line ends as they are.

    Raises:
        CheckpointError: the file is missing, cannot be read, or is not in UTF-8.
    """
    return checked_text(path, path.read_bytes)


def read_standard_input() -> str:
    """Return the text of standard input, as `read_text` does that of a file.

    Raises:
        CheckpointError: standard input is closed, cannot be read, or is not in UTF-8.
    """
    if sys.stdin is None:
        raise CheckpointError("standard input is closed; open it, or pass --prompt-file FILE.")
    return checked_text("standard input", sys.stdin.buffer.read)


def checked_argument(name: str, text: str) -> str:
    """Return the text of an argument; `name` is that of its option.

    Raises:
        CheckpointError: the text is not in UTF-8. Python keeps such bytes as surrogates.
    """
    return checked_text(name, partial(text.encode, errors="surrogateescape"))


def checked_text(source: object, read: Callable[[], bytes]) -> str:
    """Return the text in UTF-8 that `read` returns; `source` names its origin in the error.

    Raises:
        CheckpointError: the source cannot be read, or is not in UTF-8.
    """
    try:
        return read().decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source} cannot be read as text in UTF-8: {error}.") from error


def read_stop_strings(folder: str | Path) -> list[str]:
    """Return the entry stop_strings of a folder's `generation_config.json`, as a list; [] if none.

    Generation ends as soon as a text contains one of these strings.

    Raises:
        CheckpointError: the entry is neither a text, a list of texts, nor null.
    """
    path = Path(folder) / "generation_config.json"
    given = _entries(folder, path.name).get("stop_strings")
    texts = [given] if isinstance(given, str) else given or []
    if not (isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)):
        raise CheckpointError(
            f"{path} has stop_strings={given!r}, needed a text, a list of texts, or null."
        )
    return texts


def chat_prompt(folder: str | Path, text: str, now: datetime) -> str:
    """Return the prompt that a model folder's chat template makes of one message from the user.

    The template is in `chat_template.jinja`, or in `tokenizer_config.json`; of several it is the
    one named "default". It can use the same variables, functions, filters and statements as in
    transformers, but not `generation` blocks.

    Args:
        folder: the model folder.
        text: the user's message.
        now: the time that the template's `strftime_now` shows; equal on every rank.

    Returns:
        The prompt, up to where the model's answer begins.

    Raises:
        CheckpointError: there is no template, a file cannot be read, or the template fails with
            this text.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    file, (named, _) = Path(folder) / "chat_template.jinja", _special_tokens(folder)
    template = read_text(file) if is_there(file) else _entries(folder, _CONFIG).get("chat_template")
    if isinstance(template, list):  # several templates with names
        objects = [each for each in template if isinstance(each, dict)]
        found = [each.get("template") for each in objects if each.get("name") == "default"]
        template = found[-1] if found else None
    if not isinstance(template, str):
        raise CheckpointError(
            f"{folder} has no chat template: a text, or a list of objects with name and template, "
            f"one of them named default. Leave --chat out, or take a model that was tuned for "
            f"chats."
        )
    tokens = {name: _content(x) for name, x in named.items() if _content(x) is not None}
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # the filter of jinja2 escapes characters of HTML, which a prompt contains as they are
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    functions = {"raise_exception": raise_exception, "strftime_now": now.strftime}
    said = [{"role": "user", "content": text}]
    other = {"add_generation_prompt": True, "tools": None, "documents": None}
    try:
        return environment.from_string(template, globals=tokens | functions).render(
            other, messages=said
        )
    except Exception as error:  # a template is a program, and can raise any error
        raise CheckpointError(
            f"the chat template of the model fails: {type(error).__name__}: {error}."
        ) from error


class Stream:
    """Decode tokens of a sequence one by one, for example to print the text while it grows."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """Append a token. Return the new text, or "" while the last character is incomplete."""
        self._tokens.append(token)
        return "" if self._tokenizer.decode(self._tokens).endswith(_UNFINISHED) else self.rest()

    def rest(self) -> str:
        """Return the decoded text after as many characters as were returned before.

        Tokens that are added later can change earlier characters, if `rest` was called inside a
        character or bytes are not in UTF-8. Such changes are not returned.
        """
        before, self._shown = self._shown, self._tokenizer.decode(self._tokens)
        return self._shown[len(before) :]


def byte_tokenizer() -> "Tokenizer":
    """Make a tokenizer with 256 tokens: token i is the byte i of a text in UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = sorted(range(256), key=lambda byte: chr(byte) not in letters)  # printable bytes first
    vocab = dict(zip(letters, order, strict=True))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
