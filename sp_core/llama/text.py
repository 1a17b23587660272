"""Text to tokens and back, with the `tokenizer.json` of a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sp_core.errors import CheckpointError

_UNFINISHED = "\ufffd"  # what stands for bytes that are not yet a character


class Text:
    """The tokenizer of a model folder.

    Raises:
        CheckpointError: there is none, or it is broken.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise CheckpointError("prompts need tokenizers; install it with pip install 'sp-core[llama]'.") from error
        if not path.exists():
            raise CheckpointError(f"{path} is not there. Copy it from the model.")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise CheckpointError(f"{path} is broken: {error}. Copy it again.") from error

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model wants at its beginning."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._tokenizer.decode(list(tokens)))


class Stream:
    """The text of tokens that arrive one by one."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """What the token adds; nothing while a character is unfinished."""
        self._tokens.append(token)
        whole = self._text.decode(self._tokens)
        return "" if whole.endswith(_UNFINISHED) else self._show(whole)

    def rest(self) -> str:
        """What was held back."""
        return self._show(self._text.decode(self._tokens))

    def _show(self, whole: str) -> str:
        added, self._shown = whole[len(self._shown) :], whole
        return added
