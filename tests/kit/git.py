"""Make git repositories for tests, which ignore the machine's git configuration."""

import os
import subprocess
from pathlib import Path

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder; return what it printed."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    answer = subprocess.run(
        ["git", *IDENTITY, *arguments],
        cwd=folder,
        env={**outside, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return answer.stdout.strip()


def commit(folder: Path, title: str, **files: str) -> str:
    """Write some files into a folder, and commit everything in it; return the hash."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", title)
    return git(folder, "rev-parse", "HEAD")
