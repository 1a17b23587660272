"""Test the contest on a model of transformers: each contestant equals a run on one process."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.contests.peers.models import NAMES, OURS, PEERS


def test_every_contestant_computes_the_same_and_is_timed(tmp_path: Path) -> None:
    """The contestants run on two ranks. DeepSpeed is installed for this test."""
    out = tmp_path / "peers.json"
    command = (sys.executable, "-m", "benchmarks", "peers_model", "--seq", "64")
    subprocess.run([*command, "--launches", "1", "--out", str(out)], check=True, timeout=600)
    (launch,) = json.loads(out.read_text())["launches"]
    heat = launch["seqs"]["64"]
    assert [*heat] == [*OURS, *PEERS]
    for name, entry in heat.items():
        assert (entry["status"], [*entry["errors"]]) == ("ok", [*NAMES]), name
        assert entry["median_s"] > 0
