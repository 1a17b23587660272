"""What a trained model writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.launching import ROOT

PROMPT = "def "
SECONDS = 120


def continued(model: Path) -> str:
    """The command that lets a model continue a prompt on two ranks, and its answer."""
    words = ["--model", str(model), "--prompt", PROMPT, "--max-tokens", "120", "--temperature", "0.5", "--tp", "2"]
    shown = " ".join(repr(word) if " " in word else word for word in words)
    answer = subprocess.run(
        [sys.executable, "-m", "sp_core", "generate", *words, "--timeout", str(SECONDS)],
        cwd=ROOT,
        capture_output=True,
        timeout=2 * SECONDS,
        check=True,
        encoding="utf-8",
        errors="replace",
    )
    return f"sp-core generate {shown}\n{answer.stdout.rstrip()}"
