"""Ask git about a checkout, and identify the code in it."""

import hashlib
import subprocess
from contextlib import suppress
from pathlib import Path

from benchmarks.launching import ROOT, Record, UsageError


def commit(root: Path = ROOT) -> Record:
    """Return "sha", the commit's hash, and "dirty", whether files differ; each None if unknown."""
    options = ("--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    changed = git(root, "status", *options)
    dirty = None if changed is None else bool(changed)
    return {"sha": git(root, "rev-parse", "HEAD"), "dirty": dirty}


def digest(folder: Path, *patterns: str) -> str:
    """Return the SHA-256 of the names and contents of the files that match one of the patterns."""
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    parts = [(str(path.relative_to(folder)).encode(), path.read_bytes()) for path in paths]
    return hashlib.sha256(b"".join(b"%b\0%b\0" % part for part in parts)).hexdigest()


def git(root: Path, *arguments: str) -> str | None:
    """Return the output of git in a checkout; None if it fails."""
    with suppress(UsageError):
        return needed(root, *arguments)
    return None


def needed(root: Path, *arguments: str, complaint: str = "") -> str:
    """Return the output of git in a checkout.

    Raises:
        UsageError: git fails, or is not installed. Its own text follows the complaint.
    """
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=30, check=True
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    else:
        return answer.stdout.strip()
    raise UsageError(f"{complaint} git: {' '.join(said.split())}" if said else complaint)
