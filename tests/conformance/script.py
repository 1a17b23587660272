"""Write a script that shows one wrong result of a library with torch, that library and gloo alone.

The script consists of the adapter's source, the source of the flash-attn stand-in if the library
needs it, and a driver. It calls the library exactly as the trial did, and imports nothing of this
project.
"""

import inspect
import pprint
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance import flash_standin, pair
from conformance.libraries import Library

DRIVER, ATTENTION = (
    Path(__file__).with_name(f"{name}.txt") for name in ("driver", "driver_attention")
)
SECONDS = 120.0
IMPORTS = "\n".join(
    (
        "from __future__ import annotations\n",
        *("import os", "import tempfile\n", "import torch", "import torch.distributed as dist"),
        "import torch.nn.functional as F",
    )
)


def script(library: Library, verdict: dict[str, Any], version: str) -> str:
    """Return the text of a script that repeats a library's failure.

    Args:
        library: the library that failed.
        verdict: what was found: the problem, and for a wrong result its name and relative error.
        version: the library's version.
    """
    least = (verdict.get("relative") or 1.0) / 2
    found = (
        f"{verdict['result']} of rank {verdict['rank']} is wrong"
        if "result" in verdict
        else verdict["verdict"]
    )
    what = f"{library.name} ({library.package} {version}), {verdict['capability']}: {found}."
    parts = [f'"""{what}\n\nExit code 0: right after all.\n"""\n', IMPORTS]
    if library.flash:
        parts += [
            "\n# ---- a stand-in for flash-attn's kernels, exact, for the CPU",
            _source(flash_standin),
            "install()",
        ]
    parts += [f"\n# ---- the call: {library.name}", _source(library.module())]
    problem = pprint.pformat(verdict["problem"], width=120, sort_dicts=False)
    values = {"VARIANT": library.variant, "RESULT": verdict.get("result", ""), "LEAST": least}
    constants = "\n".join(
        [f"CALL = {library.subject.CALL}", *(f"{name} = {x!r}" for name, x in values.items())]
    )
    parts += [f"\n# ---- the smallest problem that was found\n{constants}\nPROBLEM = {problem}\n\n"]
    parts += [_source(pair) if library.about == "layers" else ATTENTION.read_text()]
    return "\n".join([*parts, "", DRIVER.read_text()])


def _source(module: Any) -> str:
    """Return the source of a module without its docstring and `from __future__`."""
    text = inspect.getsource(module)
    return text.partition("from __future__ import annotations\n")[2].strip("\n") + "\n"


def last_words(path: Path, patience: float = 1.0) -> str:
    """Run a script, and return the last line that it prints, cut to 300 characters.

    Return a text that says so if it prints nothing, or has not ended after `patience` times
    SECONDS.
    """
    seconds = SECONDS * patience
    try:
        answer = subprocess.run(
            [sys.executable, "-W", "ignore", str(path)],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it has not ended after {seconds:.0f} s"
    printed = [
        line.strip()
        for line in (answer.stdout.strip() or answer.stderr.strip()).splitlines()
        if line.strip()
    ]
    return printed[-1][:300] if printed else f"nothing was printed; exit code {answer.returncode}"


def shows(verdict: Mapping[str, Any]) -> bool:
    """Return whether a script has shown the failure.

    A wrong result is shown if the script prints WRONG. Ranks that hang or die are shown if the
    script does not print "right".
    """
    words: str = verdict["alone"]
    return (
        words.startswith("WRONG")
        if verdict["verdict"] == "wrong"
        else not words.startswith("right")
    )
