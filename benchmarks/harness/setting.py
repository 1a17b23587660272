"""What the runner tells the ranks of one launch, as a file of JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.records import SCHEMA_VERSION

BENCHMARKS = Path(__file__).resolve().parent.parent
MEASURING = ("harness/*.py", "bench_*.py", "measure.py", "ranks.py", "machine.py")
LAYERS = ("collectives", "schemes", "layers", "llama")
NO_COMMIT: dict[str, Any] = {"sha": None, "merge_base": None, "branch": None, "dirty": None}


@dataclass(frozen=True)
class Setting:
    """One launch.

    Args:
        out: where rank 0 appends records; nowhere if empty.
        progress: where rank 0 says what it does; nowhere if empty.
        run_id: of the invocation of the runner.
        launch: index of the launch of this P within the run.
        pair: which measurement of a comparison this is.
        commit: of the library that is measured.
        only: parts of case ids, one of which a case must contain; all cases if empty.
        layers: suites to run; all if empty.
        quick: the small selection, each case for longer.
        device: "cpu" or "cuda".
        share_gpu: let several ranks use one GPU.
    """

    out: str = ""
    progress: str = ""
    run_id: str = "by-hand"
    launch: int = 0
    pair: dict[str, Any] | None = None
    commit: dict[str, Any] = field(default_factory=lambda: dict(NO_COMMIT))
    only: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    quick: bool = False
    device: str = "cpu"
    share_gpu: bool = False

    def common(self) -> dict[str, Any]:
        """The part of a record that is the same for all cases of a launch."""
        return {
            "schema": SCHEMA_VERSION,
            "run_id": self.run_id,
            "launch": self.launch,
            "pair": self.pair,
            "commit": self.commit,
            "harness_sha": harness_sha(),
        }

    def save(self, path: Path) -> None:
        """Write it for `load`."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Setting:
        """Read what `save` has written."""
        values = json.loads(path.read_text())
        return cls(**{**values, "only": tuple(values["only"]), "layers": tuple(values["layers"])})


def harness_sha() -> str:
    """SHA-256 over the files that decide what is measured and how, so that two records can show that it was done alike."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in MEASURING for path in BENCHMARKS.glob(pattern)):
        digest.update(f"{path.relative_to(BENCHMARKS).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
