"""Define the record of a case on P ranks in one launch, for msgspec to check."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

SCHEMA_VERSION = 1
MEASURED = ("ok", "skew_limited")
STABLE_ENV = ("python", "torch", "platform", "cpu_model", "cores")
STABLE_DEVICE = ("kind", "name", "power_cap", "driver")
STABLE_TRANSPORT = ("mpi", "mode", "threads")
DIGITS = 16
AXIS = "sp"  # of a mesh with one axis

Count = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Size = Annotated[int, Meta(ge=1, le=65536)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Samples = Annotated[list[Seconds], Meta(min_length=1, max_length=10_000)]
Text = Annotated[
    str, Meta(max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*\Z")
]
Reason = Annotated[
    str, Meta(max_length=4000, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]*\Z")
]
Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.+=-]{1,80}\Z")]
Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.+=-]{1,80}(/[A-Za-z0-9_.+=-]{1,80}){0,7}\Z")]
Sha = Annotated[str, Meta(pattern=r"^[0-9a-f]{7,64}\Z")]
Mesh = Annotated[dict[Word, Size], Meta(min_length=1, max_length=8)]
Shape = Annotated[dict[Word, Count], Meta(max_length=32)]
Reading = float | Text | None
Bit = Literal[0, 1]


class Part(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a record."""


class Pair(Part):
    """The place of a launch in a comparison: stage, pair, and the slot of a side by a coin."""

    index: Count
    stage: Literal["screen", "confirm"]
    side: Literal["base", "head"]
    slot: Bit
    coin: Bit
    seed: Count


class Commit(Part):
    """The commit of the measured library."""

    sha: Sha | None
    dirty: bool | None
    merge_base: Sha | None = None
    branch: Text | None = None


class Case(Part):
    """What was measured.

    Args:
        id: name, the same for every P.
        layer: the suite: "collectives", "schemes", "layers" or "llama".
        scheme: is called.
        direction: "both" is forward and backward; None where there is only one.
        ranks: P.
        mesh: size of each axis; the product is P.
        shape: sizes of the whole problem, the same for every P.
        layout, mask, algorithm: where there is a choice.
        transport: a name of `sp_core.transport.NAMES`.
    """

    id: Id
    layer: Word
    scheme: Word
    direction: Literal["forward", "backward", "both"] | None
    ranks: Size
    mesh: Mesh
    shape: Shape
    dtype: Word
    layout: Word | None
    mask: Word | None
    algorithm: Word | None
    transport: Word


def make_case(
    layer: str,
    scheme: str,
    mesh: dict[str, int],
    shape: dict[str, int],
    transport: str,
    *,
    direction: str | None = None,
    layout: str | None = None,
    mask: str | None = None,
    algorithm: str | None = None,
    dtype: str = "float32",
    detail: str | None = None,
) -> Case:
    """Return a case whose id names all choices; `detail` tells cases of one scheme apart."""
    parts = (layer, scheme, algorithm, layout, mask, detail, direction)
    return Case(
        id="/".join(part for part in parts if part is not None),
        layer=layer,
        scheme=scheme,
        direction=direction,  # type: ignore[arg-type]
        ranks=math.prod(mesh.values()),
        mesh=mesh,
        shape=shape,
        dtype=dtype,
        layout=layout,
        mask=mask,
        algorithm=algorithm,
        transport=transport,
    )


class Device(Part):
    """Where tensors lived; `count` is that of cores, or of the GPUs that the ranks used."""

    kind: Text
    name: Text
    count: Count
    clocks: Reading
    temperature: Reading
    power_cap: Reading
    driver: Text | None


class Mpi(Part):
    """The MPI library."""

    vendor: Text
    version: Text
    library: Text


class Transport(Part):
    """How bytes travelled."""

    mpi: Mpi
    mode: Word
    threads: Size
    oversubscribed: bool
    shared_gpu: bool


class Env(Part):
    """Software and machine."""

    fingerprint: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,64}\Z")]
    python: Text
    torch: Text
    platform: Text
    cpu_model: Text
    cores: Size
    slurm_job: Text | None


class Skew(Part):
    """Seconds between the first and the last rank that left the barrier."""

    median: Seconds
    p95: Seconds
    max: Seconds


class Timing(Part):
    """Seconds of one step, from the first rank's start to the last rank's end.

    A sample has `inner` steps.
    """

    warmup: Count
    iterations: Annotated[int, Meta(ge=1, le=10_000)]
    inner: Annotated[int, Meta(ge=1, le=1_000_000)]
    samples_s: Samples
    max_local_s: Samples
    per_rank_median_s: Samples
    median_s: Seconds
    imbalance: Annotated[float, Meta(ge=1, le=65536)]
    barrier_skew_s: Skew
    skew_limited: bool


class Phase(Part):
    """Seconds of a part of a step, on the slowest rank and on average."""

    max_s: Seconds
    mean_s: Seconds


class Traffic(Part):
    """An operation in one step: bytes over all ranks, seconds of the rank that waited longest."""

    calls: Count
    messages: Count
    bytes_sent: Count
    bytes_formula: Count | None
    seconds: Seconds
    bytes_result: Count | None = None


class Memory(Part):
    """Bytes of the rank that held most."""

    peak_bytes: Count
    method: Text


class Work(Part):
    """One step over all ranks."""

    flops: Count | None
    tokens: Count | None
    bytes_formula: Count | None = None


class Record(Part):
    """A case on P ranks in one launch.

    The parts from `device` to `work` are None if it was not measured.
    """

    schema: Literal[1]
    run_id: Word
    launch: Count
    pair: Pair | None
    commit: Commit
    harness_sha: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    case: Case
    device: Device | None
    transport: Transport | None
    env: Env | None
    timing: Timing | None
    phases: Annotated[dict[Word, Phase], Meta(max_length=32)] | None
    comm: Annotated[dict[Word, Traffic], Meta(max_length=32)] | None
    memory: Memory | None
    work: Work | None
    status: Literal["ok", "failed", "oom", "timeout", "wrong", "skew_limited", "missing"]
    reason: Reason | None

    @property
    def key(self) -> tuple[str, int]:
        """Case id and number of ranks."""
        return self.case.id, self.case.ranks

    @property
    def seconds(self) -> float:
        """The median of a step; 0 if it was not measured."""
        return 0.0 if self.timing is None or self.status not in MEASURED else self.timing.median_s


def fingerprint(env: dict[str, Any], device: dict[str, Any], transport: dict[str, Any]) -> str:
    """Return a name for machine and software, the same in every run and for every number of ranks.

    Args:
        env, device, transport: these parts of a record; a fingerprint in `env` is not read.
            Temperature, clocks, the Slurm job and the consequences of the number of ranks are left
            out.
    """
    parts = ((env, STABLE_ENV), (device, STABLE_DEVICE), (transport, STABLE_TRANSPORT))
    stable = [[part.get(name) for name in names] for part, names in parts]
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()[:DIGITS]
