"""Run git as a function. If git fails, the error has the text that git printed."""

import os
import subprocess
from collections.abc import Mapping


class GitFailed(Exception):
    """git failed; the text is what git printed."""


def git(*arguments: str, data: bytes = b"", settings: Mapping[str, str] | None = None) -> bytes:
    """Run git here, and return what it printed.

    Args:
        arguments: the arguments after `git`.
        data: the standard input of git.
        settings: variables of git's configuration for this call; they appear in no file and in no
            list of processes.

    Raises:
        GitFailed: git did not exit with 0.
    """
    names = {f"GIT_CONFIG_KEY_{place}": name for place, name in enumerate(settings or {})}
    values = {
        f"GIT_CONFIG_VALUE_{place}": value for place, value in enumerate((settings or {}).values())
    }
    environment = (
        {**os.environ, "GIT_CONFIG_COUNT": str(len(names)), **names, **values} if settings else None
    )
    answer = subprocess.run(
        ["git", *arguments], input=data, capture_output=True, check=False, env=environment
    )
    if answer.returncode:
        raise GitFailed(
            f"git {' '.join(arguments)} failed:\n{answer.stderr.decode(errors='replace').strip()}"
        )
    return answer.stdout


def say(*arguments: str) -> str:
    """Return what git prints, as text. File names need not be UTF-8."""
    return git(*arguments).decode(errors="surrogateescape").strip()
