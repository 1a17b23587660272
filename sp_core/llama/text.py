"""Read a model folder's tokenizer, stop strings and chat template, and turn tokens into text.

The command line uses these functions. `byte_tokenizer` needs no folder. Nothing here communicates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sp_core.errors import CheckpointError
from sp_core.llama.config import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"  # the decoder writes this for bytes that are not yet a whole character


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer in `tokenizer.json` of a model folder.

    Raises:
        CheckpointError: the file is missing or broken, or `tokenizers` is not installed.
    """
    path = Path(folder) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "prompts need tokenizers; install it with pip install 'sp-core[llama]'."
        ) from error
    if not path.exists():
        raise CheckpointError(
            f"{path} is not there. Copy it from the folder of the "
            "model that this one was made of, or pass tokenizer= to sp_core.llama.save."
        )
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())  # from_file takes UTF-8 paths only
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{path} is broken: {error}. Copy it again.") from error
    tokenizer.no_truncation()  # the file keeps both from the training of the model
    tokenizer.no_padding()
    return tokenizer


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
    given = read_json(path).get("stop_strings") if path.exists() else None
    texts = [given] if isinstance(given, str) else given or []
    if not (isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)):
        raise CheckpointError(
            f"{path} has stop_strings={given!r}, needed a text, a list of texts, or null."
        )
    return texts


def chat_prompt(folder: str | Path, text: str, now: datetime) -> str:
    """Return the prompt that a model folder's chat template makes of one message from the user.

    The template is in `chat_template.jinja`, or in `tokenizer_config.json`. It can use the same
    variables, functions, filters and statements as in transformers, but not `generation` blocks.

    Args:
        folder: the model folder.
        text: the user's message.
        now: the time that the template's `strftime_now` shows; equal on every rank.

    Returns:
        The prompt, up to where the model's answer begins.

    Raises:
        CheckpointError: there is no template, or the template fails with this text.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    file, settings = Path(folder) / "chat_template.jinja", Path(folder) / "tokenizer_config.json"
    values = read_json(settings) if settings.exists() else {}
    template = read_text(file) if file.exists() else values.get("chat_template")
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
    named = {name: value for name, value in values.items() if name.endswith("_token")}
    texts = {name: x.get("content") if isinstance(x, dict) else x for name, x in named.items()}
    tokens = {name: text for name, text in texts.items() if isinstance(text, str)}
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

    def __init__(self, tokenizer: Tokenizer) -> None:
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


def byte_tokenizer() -> Tokenizer:
    """Make a tokenizer with 256 tokens: token i is the byte i of a text in UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = sorted(range(256), key=lambda byte: chr(byte) not in letters)  # printable bytes first
    vocab = dict(zip(letters, order, strict=True))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
