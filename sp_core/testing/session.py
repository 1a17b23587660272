"""Keep what the tests of a session share, and pass remarks from a body to Hypothesis.

A remark is an event, a feature, a target, a note or an error ratio, made on any rank by the
function of that name. Ratios are errors divided by their bounds.
"""

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Remarks = dict[tuple[str, ...], float]
"""The remarks of one example, on one rank or on all.

A key is the kind ("event", "feature", "target", "note" or "ratio"), the name or text, and for an
event its detail. The number is that of a target or a ratio, else 0.
"""


def replay(remarks: Remarks) -> None:
    """Hand events, features, targets and notes to Hypothesis, if this thread runs its test."""
    hypothesis = sys.modules.get("hypothesis")
    if hypothesis is None or not hypothesis.currently_in_test_context():
        return
    for (kind, *said), number in remarks.items():
        if kind == "target":
            hypothesis.target(number, label=said[0])
        elif kind != "ratio":
            getattr(hypothesis, "event" if kind == "feature" else kind)(*said)


def keep_largest(mine: dict[Any, float], theirs: Mapping[Any, float]) -> None:
    """Add the numbers of `theirs` to `mine`, by name; of two numbers the larger stays.

    NaN counts as the largest, because an error that is NaN is the worst.
    """
    for name, value in theirs.items():
        mine[name] = max(mine.get(name, value), value, key=lambda x: (math.isnan(x), x))


@dataclass
class Tally:
    """Counts of one session, or of several.

    Attributes:
        examples: number of examples run.
        raw: number of examples run once more without the checks between ranks.
        tests: number of tests that ran on ranks.
        sizes: number of examples by number of ranks.
        features: number of examples by feature.
        ratios: the greatest error over bound, by name.
    """

    examples: int = 0
    raw: int = 0
    tests: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    ratios: dict[str, float] = field(default_factory=dict)

    def count(self, ranks: int, remarks: Remarks, *, raw: bool = False) -> None:
        """Count one example and its features; keep the largest error / bound of each result.

        A raw example is not counted again: it was counted when it ran with checks between ranks.
        """
        self.raw += raw
        if not raw:
            self.examples += 1
            self.sizes[ranks] += 1
            self.features.update(name for kind, name, *_ in remarks if kind == "feature")
        self.keep_ratios(remarks)

    def keep_ratios(self, remarks: Remarks) -> None:
        """Keep the largest error / bound of each result."""
        ratios = {name: number for (kind, name, *_), number in remarks.items() if kind == "ratio"}
        keep_largest(self.ratios, ratios)

    def merge(self, other: "Tally") -> None:
        """Add another session's counts; of each result keep the larger ratio of error to bound."""
        keep_largest(self.ratios, other.ratios)
        for name in ("examples", "raw", "tests", "sizes", "features"):
            vars(self)[name] += vars(other)[name]


@dataclass
class Session:
    """Options and counts of this process's pytest session.

    The pytest plugin sets it up. The defaults are those of a run without the plugin.

    Attributes:
        control: exchanges values between all ranks of the launch; None if ranks are threads.
        ranks: number of ranks of the launches that `attempt` starts; 0 without them.
        attempt: runs an example in another launch (see `shrink_crash`); default: on threads.
        device: "cpu" or the type of an accelerator.
        share_gpu: whether several ranks may use one GPU.
        gpu_is_shared: whether another rank of this launch uses this rank's GPU.
        raw_replay: whether passed examples run again without the checks between ranks.
        profile: Hypothesis' profile that the command line names, if any.
        seed: Hypothesis' seed, if one is in use; else None.
        node_id: id of the running test.
        tally: counts of this session.
        notes: lines for the end of the report.
    """

    control: Any = None
    ranks: int = 0
    attempt: Callable[..., Any] | None = None
    device: str = "cpu"
    share_gpu: bool = False
    gpu_is_shared: bool = False
    raw_replay: bool = True
    profile: str | None = None
    seed: int | str | None = None
    node_id: str = ""
    tally: Tally = field(default_factory=Tally)
    notes: dict[str, None] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """The number of ranks of this launch, or of those of `attempt`; 0 if ranks are threads."""
        return self.ranks if self.control is None else int(self.control.size)

    def summary(self) -> str:
        """Return a line with the numbers of tests and of examples, in all and by number of ranks.

        If examples have named a scheme with `features`, a second line counts them by scheme.
        """
        tally = self.tally
        raw = f" (+ {tally.raw} raw)" if tally.raw else ""
        line = (
            f"{tier()}: {tally.tests} tests, {tally.examples} examples{raw}; "
            f"examples by ranks {_listed(tally.sizes)}"
        )
        schemes = {
            name.removeprefix("scheme="): number
            for name, number in tally.features.items()
            if name.startswith("scheme=")
        }
        return f"{line}\nexamples by scheme {_listed(schemes)}" if schemes else line


def _listed(counts: Mapping[Any, int]) -> str:
    return "{" + ", ".join(f"{name}: {count}" for name, count in sorted(counts.items())) + "}"


current = Session()
thread = threading.local()
"""Its attribute `sink`, if there is one, takes the thread's remarks while it runs an example."""
_lock = threading.Lock()  # ranks that are threads write to one sink


@contextmanager
def collected() -> Iterator[Remarks]:
    """Collect the remarks that this thread makes in a `with` block."""
    before, thread.sink = getattr(thread, "sink", None), {}
    try:
        yield thread.sink
    finally:
        thread.sink = before


def event(value: str, payload: str | float = "") -> None:
    """Count the examples of a class, as Hypothesis' `event` does.

    Any rank may call this; an example counts once however many ranks do.

    Args:
        value: name of the class.
        payload: more detail; each value of it is a class of its own.
    """
    remark({("event", value, str(payload)): 0.0})


def features(values: Mapping[str, object]) -> None:
    """Count the features of the example over the session, and as events; may be called on any rank.

    Args:
        values: the example's value in each dimension in which examples differ, such as
            {"scheme": "ring"}.
    """
    remark({("feature", f"{dimension}={value}"): 0.0 for dimension, value in values.items()})


def target(observation: float, *, label: str = "") -> None:
    """Let Hypothesis look for examples that make a number large; the largest over the ranks counts.

    It may be called on any rank.

    Args:
        observation: finite number.
        label: tells several targets of one test apart.

    Raises:
        ValueError: `observation` is infinite, NaN or no number.
    """
    if not math.isfinite(number := float(observation)):
        raise ValueError(f"a target must be finite, but {number} was given.")
    remark({("target", label): number})


def note(value: object) -> None:
    """Show a value with the minimal example; may be called on any rank.

    A note that several ranks make is shown once.
    """
    remark({("note", str(value)): 0.0})


def record_ratio(name: str, value: float) -> None:
    """Record an error divided by its bound; may be called on any rank.

    The greatest value of each name is printed at the end of the session.

    Args:
        name: names the compared result in the report.
        value: error over bound; a session whose greatest value is above the option
            `sp_max_error_ratio` (0.5) fails.
    """
    remark({("ratio", name): value})


def remark(remarks: Remarks) -> None:
    """Add remarks (an event, note, ...) to those of the example that this thread runs.

    If it runs none, keep the errors over their bounds for the session. Hand all other remarks to
    Hypothesis, if a test of Hypothesis itself is running.
    """
    with _lock:
        if (sink := getattr(thread, "sink", None)) is not None:
            keep_largest(sink, remarks)
            return
        current.tally.keep_ratios(remarks)
    replay(remarks)


def tier() -> Literal["threads", "mpi"]:
    """Return what ranks are in this session: "threads" or "mpi" (processes)."""
    return "threads" if current.control is None else "mpi"


def device() -> "torch.device":
    """Return the device that the tests of this rank use, as `--sp-device` says.

    For an accelerator it is the device with the number that this rank has on its machine. With
    `--sp-share-gpu` there may be fewer devices than ranks; then ranks get them round-robin.

    Raises:
        DeviceError: the machine has no such device; or another rank uses this rank's device, and
            `--sp-share-gpu` was not given.
    """
    import torch

    if current.device == "cpu":
        return torch.device("cpu")
    from sp_core.errors import DeviceError
    from sp_core.machine import local_rank
    from sp_core.transport import count_devices

    local, count = local_rank(), count_devices(current.device)
    if count == 0 or (current.gpu_is_shared and not current.share_gpu):
        raise DeviceError(
            f"local rank {local} has no {current.device} device of its own: torch sees {count}. "
            "Pass --sp-share-gpu or start fewer ranks."
        )
    return torch.device(current.device, local % count)


def find_shared_gpu(session: Session, world: Any) -> None:
    """Find out whether another rank uses this rank's GPU, and set `session.gpu_is_shared`.

    Every rank calls this. Each may see its own GPU as number 0, so the ranks compare UUIDs.
    """
    if session.device == "cpu":
        return
    from sp_core.transport import count_devices
    from sp_core.transport.cuda import uuid_of

    mine = uuid_of(device()) if count_devices(session.device) else f"none of rank {world.rank}"
    session.gpu_is_shared = world.allgather(mine).count(mine) > 1
