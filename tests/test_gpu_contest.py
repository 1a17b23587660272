"""Test the contest of AllGather between ranks that share a GPU: its figures, and its checks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.contests import gpu
from sp_core.testing import run_threads

YES, NO = "reached", "not reached"
UNEVEN = [1, 2, 3, 4, 5, 6]


def gathered(ranks: int, uneven: Sequence[str] = (), **milliseconds: float) -> dict[str, Any]:
    """Make a launch of six rounds. The link moves the whole vector down in 0.25 ms, up in 0.5.

    The transports in `uneven` take 1 to 6 times as long as the others say.
    """
    samples = {
        name: [ms * 1e-3 * k for k in (UNEVEN if name in uneven else [1] * 6)]
        for name, ms in milliseconds.items()
    }
    beside = {"down": (0.25, 0.25), "up": (0.5, 0.5), "computation": (2.0, 3.0 * ranks)}
    timed = {
        f"{name}, {who}": [ms * 1e-3] * 5
        for name, both in beside.items()
        for who, ms in zip(("one rank", "all ranks"), both, strict=True)
    }
    return {
        "ranks": ranks,
        "status": "ok",
        "nbytes": 2**24,
        "samples": samples,
        "beside": {**timed, gpu.GATHER: [3e-3] * 5},
        "missing": {"device": "it says no"},
    }


@pytest.mark.parametrize(
    ("found", "on_gpu", "marks"),
    [
        (gathered(2, naive=9, staged=5, pipelined=0.9, ipc=0.18), True, ["", "", YES, YES]),
        (gathered(2, pipelined=1.1, ipc=0.23), True, [NO, NO]),
        (gathered(4, pipelined=2.1), True, [YES]),  # the link needs 1.5 ms: 71 %
        (gathered(4, pipelined=2.2), True, [NO]),
        (gathered(4, ["ipc"], pipelined=8, ipc=0.4), True, [NO, f"{YES}, open"]),
        (gathered(4, ["pipelined", "ipc"], pipelined=8, ipc=1.5), True, [NO, YES]),
        (gathered(2, ["pipelined"], pipelined=0.2), True, [f"{YES}, open"]),
        (gathered(2, pipelined=0.1), False, [""]),
    ],
)
def test_what_is_reached_and_open_by_the_ratios_of_a_round(
    found: dict[str, Any], on_gpu: bool, marks: list[str]
) -> None:
    shown = {row[0]: row[-1] for row in gpu.rows(found, on_gpu=on_gpu)}
    assert shown == dict(zip(found["samples"], marks, strict=True))


def small(comm: Any) -> dict[str, Any]:
    return gpu.measured(comm, torch.device("cpu"), 4096, side=8, seconds=0.0)


def test_every_way_is_checked_and_timed(substitute: Any) -> None:
    substitute(gpu, ON_CPU=("host", "window", "ipc"), LEAST_ROUNDS=2)
    found = run_threads(2, small)[0]
    lengths = {name: len(samples) for name, samples in found["samples"].items()}
    assert lengths == {"naive": 2, "host": 2, "window": 2}
    assert set(found["beside"]) == set(gathered(2)["beside"])
    assert "ipc" in found["missing"]["ipc"]
    assert {row[0] for row in gpu.rows(found, on_gpu=False)} == {*lengths}
    substitute(gpu, naive=lambda world, x: x.new_zeros(world.size * x.numel()))
    with pytest.raises(Exception, match="naive: the gathered numbers are not the ones"):
        run_threads(2, small)


def test_what_is_shown() -> None:
    good = {**gathered(2, naive=9, pipelined=0.9), "device": {"name": "a GPU"}}
    shown = str(list(gpu.show({"kind": "cuda", "launches": [good]})))
    for text in ("pipelined", "reached", "device: it says no", "1.50 times as long", "3.000 ms"):
        assert text in shown
