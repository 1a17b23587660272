"""Records of measurements: a JSON line for each case, number of ranks and launch.

A file of records is data from elsewhere (another machine, another commit, a pull request), so it is
checked like hostile input, by msgspec. Written records are checked in the same way: nothing is
written that cannot be read.
"""

import io
import math
import os
import re
import statistics
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

SCHEMA_VERSION = 1
MEASURED = ("ok", "skew_limited")
NEEDED = ("device", "transport", "env", "timing", "phases", "comm")
"""The parts that a record with a time must have."""

AXIS = "sp"  # the name of the axis of a mesh that has only one
MAX_BYTES = 256 << 20  # the largest file
MAX_SAMPLES = 10_000
MAX_LINE = 1 << 20  # bytes; 10,000 samples of three kinds are about 600 KiB
SHOWN = 160  # characters of a value that an error repeats
CLOSE = 1e-9  # relative tolerance; a median that is computed again differs by rounding only

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Size = Annotated[int, msgspec.Meta(ge=1, le=65536)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Samples = Annotated[list[Seconds], msgspec.Meta(min_length=1, max_length=MAX_SAMPLES)]
Text = Annotated[
    str, msgspec.Meta(max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*\Z")
]
Reason = Annotated[
    str, msgspec.Meta(max_length=4000, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]*\Z")
]
Word = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.+=-]{1,80}\Z")]
Id = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.+=-]{1,80}(/[A-Za-z0-9_.+=-]{1,80}){0,7}\Z")
]
Sha = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{7,64}\Z")]
Mesh = Annotated[dict[Word, Size], msgspec.Meta(min_length=1, max_length=8)]
Shape = Annotated[dict[Word, Count], msgspec.Meta(max_length=32)]
Measured = float | Text | None
Bit = Literal[0, 1]


class ForeignError(ValueError):
    """A file or record that cannot be used; the text says why."""


class Part(msgspec.Struct, omit_defaults=True):
    """A part of a record. Unknown fields, which older records may have, are ignored on reading."""


class Pair(Part):
    """The place of a launch in a comparison of two commits.

    `index` is the pair's index in its stage. `slot` is 0 for the first launch of the pair, else 1.
    `coin` is the throw that ordered the pair, 0 if base runs first. `seed` is that of all coins.
    """

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


class Case(Part):
    """What was measured.

    Args:
        id: the case's name, the same for every P.
        layer: the suite: "collectives", "schemes", "layers" or "llama".
        scheme: the scheme, collective or kind of work (such as "decode") that is timed.
        direction: "both" means forward and backward; None if the suite has no choice.
        ranks: P, the number of ranks.
        mesh: size of each axis; the product is P.
        shape: sizes of the whole problem, the same for every P.
        layout, mask, algorithm: their names; None if the case has no choice.
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
    """The device of the tensors. `count`: the machine's cores, or the GPUs that the ranks used."""

    kind: Text
    name: Text
    count: Count
    clocks: Measured
    temperature: Measured
    power_cap: Measured
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

    fingerprint: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8,64}\Z")]
    python: Text
    torch: Text
    platform: Text
    cpu_model: Text
    cores: Size
    slurm_job: Text | None


class Timing(Part):
    """Seconds of one step, from the start of the earliest rank to the end of the last one.

    A sample is the mean of `inner` steps. The skew is the time between the first and the last rank
    that leaves the barrier before a sample.
    """

    iterations: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
    inner: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    samples_s: Samples
    per_rank_median_s: Samples
    median_s: Seconds
    imbalance: Annotated[float, msgspec.Meta(ge=1, le=65536)]
    barrier_skew_s: Annotated[dict[Word, Seconds], msgspec.Meta(max_length=8)]
    skew_limited: bool

    def __post_init__(self) -> None:
        """Refuse numbers that do not fit together."""
        if (found := len(self.samples_s)) != self.iterations:
            raise ValueError(f"samples_s has {found} numbers, the record says {self.iterations}.")
        median = statistics.median(self.samples_s)
        if not math.isclose(self.median_s, median, rel_tol=CLOSE):
            raise ValueError(f"median_s is {self.median_s}, the median of the samples is {median}.")


class Phase(Part):
    """Seconds of one phase of a step: on the slowest rank, and the mean over the ranks."""

    max_s: Seconds
    mean_s: Seconds


class Traffic(Part):
    """One operation of a step: bytes over all ranks, and seconds of the rank that waits longest."""

    bytes_sent: Count
    seconds: Seconds
    bytes_result: Count | None = None


class Memory(Part):
    """The highest peak of tensor bytes on any rank, and how it was measured."""

    peak_bytes: Count
    method: Text


class Work(Part):
    """The work of one step over all ranks; None for a number that is not known."""

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
    harness_sha: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    case: Case
    device: Device | None
    transport: Transport | None
    env: Env | None
    timing: Timing | None
    phases: Annotated[dict[Word, Phase], msgspec.Meta(max_length=32)] | None
    comm: Annotated[dict[Word, Traffic], msgspec.Meta(max_length=32)] | None
    memory: Memory | None
    work: Work | None
    status: Literal["ok", "failed", "oom", "timeout", "wrong", "skew_limited", "missing"]
    reason: Reason | None

    def __post_init__(self) -> None:
        """Refuse parts that do not fit together."""
        case, is_timed = self.case, self.status in MEASURED
        if math.prod(case.mesh.values()) != case.ranks:
            raise ValueError(f"$.case: the mesh {case.mesh} has not {case.ranks} ranks.")
        for name in NEEDED if is_timed else ("reason",):
            if getattr(self, name) in (None, ""):
                raise ValueError(f"$.{name}: a record whose status is {self.status} needs it.")
        if self.phases is not None and "total" not in self.phases:
            raise ValueError("$.phases: there is no total.")
        found = len(self.timing.per_rank_median_s) if self.timing else case.ranks
        if found != case.ranks:
            raise ValueError(
                f"per_rank_median_s has {found} numbers, the record says {case.ranks}."
            )

    @property
    def key(self) -> tuple[str, int]:
        """Case id and number of ranks."""
        return self.case.id, self.case.ranks

    @property
    def seconds(self) -> float:
        """The median seconds of a step; 0 if it was not measured."""
        return 0.0 if self.timing is None or self.status not in MEASURED else self.timing.median_s


def parse(line: bytes) -> Record:
    """Read the record that a line holds.

    Args:
        line: UTF-8 text of one JSON object, without the end of line. The last value of a repeated
            key counts.

    Raises:
        ForeignError: the line is no JSON, has a number that is not finite, is too long, or is no
            record.
    """
    if len(line) > MAX_LINE:
        raise ForeignError(f"the line has {len(line)} bytes, {MAX_LINE} are allowed.")
    try:
        return msgspec.json.decode(line, type=Record)
    except msgspec.ValidationError as error:
        raise ForeignError(short(error)) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ForeignError(f"no JSON: {short(error)}") from error


def reason(told: str) -> str:
    """Return any text as a record's reason: cut, without control characters."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", told).encode(errors="replace").decode()
    return (
        "".join(c if c == "\n" or c.isprintable() else " " for c in plain).strip()[:4000]
        or "no text"
    )


def short(value: object) -> str:
    """Return a value, cut and on one line, for an error text."""
    shown = str(value).encode("unicode_escape").decode()
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."


class Reading(msgspec.Struct):
    """The valid records of a file in its order, and a line of text for each problem."""

    records: list[Record] = []
    problems: list[str] = []


def append(path: Path | str, record: Record | dict[str, Any]) -> None:
    """Append a record to a file, create the file if it is missing, and flush it to the disk.

    Args:
        path: the file; its folder exists.
        record: a valid record.

    Raises:
        ForeignError: the record is not valid or is too long; nothing is written.
        OSError: the file cannot be written.
    """
    try:
        line = msgspec.json.encode(record)
    except (ValueError, TypeError, RecursionError) as error:
        raise ForeignError(f"no JSON: {short(error)}") from error
    parse(line)
    with Path(path).open("a+b") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        was_cut = file.read(1) not in (b"", b"\n")  # its writer ended within a line
        file.write(b"\n" * was_cut + line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path | str) -> Reading:
    """Read the records of a file that can be used, and say what is wrong with the rest.

    Args:
        path: a file of JSON lines, from any source.

    Returns:
        The records and the problems. A missing or damaged file is a problem, not an exception.
    """
    try:
        return read_lines(read_bytes(Path(path)), str(path))
    except ForeignError as error:
        return Reading(problems=[str(error)])


def read_lines(content: bytes, name: str) -> Reading:
    """Read the records of a file with this name and content, as `read` does."""
    found = Reading()
    for number, line in enumerate(io.BytesIO(content), 1):
        try:
            if line.strip():
                found.records.append(parse(line.rstrip(b"\r\n")))
        except ForeignError as error:
            found.problems.append(f"{name}, line {number}: {error}")
    return found


def read_bytes(path: Path) -> bytes:
    """Read a file of bounded size.

    Raises:
        ForeignError: the file is missing, is too large, or is no ordinary file.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would keep the reader waiting for ever
            raise OSError(0, "this is no ordinary file.")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise OSError(0, f"the file has {size} bytes, {MAX_BYTES} are allowed. Split it.")
        return path.read_bytes()
    except OSError as error:
        raise ForeignError(f"{path}: {error.strerror}") from error
