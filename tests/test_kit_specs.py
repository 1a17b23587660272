"""Test that buffer specifications are read as mpi4py reads them.

Rank 0 is its own neighbour several times, so one process sends blocks to several ranks.
"""

import functools
import itertools
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from kit.wrong_calls import Copied
from mpi4py import MPI

from sp_core.testing.specs import read

CALLS = {"": "allgatherv", "B": "alltoall", "V": "alltoallv", "W": "alltoallw"}
"""A call in which a buffer of each form is sent."""
MOST, AROUND = 256, 2048
"""The most bytes of a part, and the number of other bytes on each side of a buffer."""
OTHER, UNSENT = 254, 255
"""The bytes around a buffer, and those of memory into which nothing was received."""


def memory() -> np.ndarray[Any, Any]:
    """Return 48 bytes with other bytes around them."""
    around = np.full(48 + 2 * AROUND, OTHER, "u1")
    around[AROUND : AROUND + 48] = np.arange(48)
    return around[AROUND : AROUND + 48]


@functools.cache
def ring(n: int) -> Any:
    """Return a communicator on which this process is its own neighbour n times."""
    return MPI.COMM_SELF.Create_dist_graph_adjacent([0] * n, [0] * n)


def moved(spec: Any, form: str, n: int) -> list[bytes] | None:
    """Return the bytes that mpi4py sends to each of n ranks; None if it refuses."""
    send = getattr(ring(n), f"Neighbor_{CALLS[form]}")
    for block in range(MOST, -1, -1) if form == "B" else [MOST]:
        into = np.full((n, block), UNSENT, "u1")
        places = [block] * n, [block * rank for rank in range(n)]
        types: dict[str, Any] = {"B": [block, MPI.BYTE], "W": [places, [MPI.BYTE] * n]}
        try:
            send(spec, [into, *types.get(form, [places, MPI.BYTE])])
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                return None
        except (TypeError, ValueError, KeyError, BufferError, OverflowError):
            return None
        else:
            return [row[row != UNSENT].tobytes() for row in into]
    raise AssertionError(f"{spec} sends more than {MOST} bytes")


Meaning = tuple[str, list[tuple[str, bytes | int]]] | None
"""Text of a specification, and kind and bytes of each part; None if it is refused.

The number of bytes stands for bytes that do not lie next to each other.
"""


def wanted(spec: Any, form: str, n: int, size: int, kind: str, *, gaps: bool = False) -> Meaning:
    """Return the meaning of a specification, computed from the bytes that mpi4py moves."""
    parts = moved(spec, form, n)
    if parts is None or any(OTHER in part for part in parts):
        return None
    counts = [len(part) // (1 if form == "W" else size) for part in parts]
    text = f"{counts if form in ('V', 'W') else counts[0]} x {kind or 'byte'}"
    return text, [(kind, len(part) if gaps else part) for part in parts[: None if form else 1]]


def found(spec: Any, form: str, n: int, *, writable: bool = False) -> Meaning:
    """Return the meaning of a specification as the kit reads it."""
    try:
        meaning = read(spec, form, n, writable=writable)
    except (TypeError, ValueError, LookupError, AttributeError, BufferError, MPI.Exception):
        return None
    return meaning.text, [
        (part.kind, part.nbytes if part.view is None else part.view.tobytes())
        for part in meaning.parts
    ]


def tails(n: int) -> list[list[Any]]:
    """Return what may follow the buffer of a specification, before the datatype."""
    some, where, no = [1, 2, 1][:n], [2, 0, 1][:n], [None]
    pair, text = [some, where], [[2.0], ["2"], [np.int64(1)], [np.array(2)], [()], [[]]]
    numbers = [[], [2], [0], [-1], [7], [1, 3], [1, -1], [1, 2, 3, 4], [(1, 3)], [(2, None)]]
    lists: list[Any] = [
        [x] for x in (some, tuple(some), np.array(some), (1, 3, 1), [-1] * n, [1] * (n + 1))
    ]
    pairs: list[Any] = [[tuple(pair)], pair, [[*pair]], [*map(tuple, pair)], [[*map(tuple, pair)]]]
    pairs += [[some, [1] * (n + 1)], [some, [5] * n], [some, [-1] * n], [[0] * n, [50] * n]]
    places = [8 * place for place in where]
    pairs += [[some, places], [(some, places)], [[some, places]], [[*map(tuple, pair)], None]]
    halves = [no, no * 2, [(None, None)], [some, None], [None, where], [(some, None)]]
    mixed = [[(None, where)], [(some, 2)], [some, 2], [1, where], [(some, where), None]]
    return [*text, *numbers, *lists, *pairs, *halves, *mixed]


DOUBLE = MPI.DOUBLE
PAIR, LOST = DOUBLE.Create_contiguous(2).Commit(), DOUBLE.Create_contiguous(2)
TYPES: dict[str, tuple[Any, int, str]] = {
    "absent": ("", 8, "float64"),
    "none": (None, 8, "float64"),
    "letter": ("d", 8, "float64"),
    "unknown": ("zz", 8, ""),
    "bytes": (MPI.BYTE, 1, ""),
    "shorter": (MPI.INT, 4, "int32"),
    "pair": (PAIR, 16, "float64"),
    "null": (MPI.DATATYPE_NULL, 8, ""),
    "not committed": (LOST, 8, ""),
}
"""Datatypes, with their sizes and kinds."""
GAPS: dict[str, tuple[Any, int, str]] = {
    "every second": (DOUBLE.Create_vector(2, 1, 2), 16, "float64"),
    "not the first": (DOUBLE.Create_hindexed([1], [8]), 8, "float64"),
    "far apart": (DOUBLE.Create_resized(0, 16), 8, "float64"),
    "mixed": (MPI.Datatype.Create_struct([1, 1], [0, 8], [DOUBLE, MPI.INT]), 12, "float64,int32"),
    "nested": (PAIR.Create_hvector(2, 1, 24), 32, "float64"),
    "in one place": (DOUBLE.Create_resized(0, 0), 8, "float64"),
    "backwards": (DOUBLE.Create_resized(0, -8), 8, "float64"),
    "wide": (PAIR.Create_resized(-8, 24), 16, "float64"),
}
"""Datatypes of which an element is not the bytes from its beginning to its end."""
for gaps, *_ in GAPS.values():
    gaps.Commit()
TYPES |= GAPS


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("form", CALLS)
def test_a_specification_means_what_it_means_to_mpi4py(form: str, n: int) -> None:
    """What mpi4py refuses is refused, and so is what it would read outside of the buffer."""
    differ = []
    for (name, (datatype, size, kind)), tail in itertools.product(TYPES.items(), tails(n)):
        if form == "W" and name in ("absent", "none", "letter"):
            continue  # mpi4py refuses what the kit takes
        last = [datatype] * n if form == "W" else datatype
        spec = [memory().view("f8"), *tail, *([] if name == "absent" else [last])]
        seen = found(spec, form, n)
        valid = name not in ("null", "not committed")  # MPICH takes no elements of these
        known = wanted(spec, form, n, size, kind, gaps=name in GAPS) if valid else None
        if seen != known and not (known is None and name in GAPS):
            differ.append((spec[1:], seen, known))
    assert not differ


class Exported:
    """A buffer that shares its memory in the way that is named only."""

    def __init__(self, way: str, data: Any) -> None:
        for name in (way, "__dlpack_device__") if way == "__dlpack__" else (way,):
            setattr(self, name, getattr(data, name))


class OnDevice:
    """Memory that is described as memory on a GPU is."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.__cuda_array_interface__ = data.__array_interface__ | {"version": 3}


def buffers() -> dict[str, Any]:
    """Return objects, some of which mpi4py takes for buffers."""
    plain: Any = memory()
    codes = (*"?bBhHiIqQefdFDO", "S1", "S3", ">f8", "M8[s]")
    numbers = {code: np.arange(4).astype("f8").astype(code) for code in codes}
    few = numbers["d"].reshape(2, 2)
    lent: dict[str, Any] = {
        f"dlpack {code}": Exported("__dlpack__", numbers[code]) for code in "?bBhHiIqQefdFD"
    }
    lent |= {f"gpu {code}": OnDevice(numbers[code]) for code in "?bBhHiIqQfdFD"}
    odd = {
        "strides": few[:, 0],
        "columns": few.T,
        "none": few[:0],
        "bytes B": plain.tobytes(),
        "0d": np.array(3.0),
    }
    others = [bytearray(plain), memoryview(plain), array("d", [1, 2]), Copied()]
    others += [None, MPI.BOTTOM, [1.0, 2.0], "text", 3, np.float64(3), torch.arange(3.0)]
    others += [torch.arange(3), torch.zeros(2, dtype=torch.complex128), torch.arange(4)[::2]]
    return numbers | lent | odd | {repr(other)[:30]: other for other in others}


SIX = np.arange(6.0)


def receives(buffer: Any) -> bool:
    """Return whether mpi4py takes a buffer to receive into."""
    try:
        MPI.COMM_SELF.Recv_init(buffer, 0).Free()
    except (TypeError, ValueError, KeyError, BufferError):
        return False
    return True


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("form", ["", "B", "V"])
def test_a_buffer_is_what_mpi4py_takes_for_one(form: str, n: int) -> None:
    for name, buffer in buffers().items():
        code = name.rpartition(" ")[2]
        is_named = isinstance(buffer, Exported | OnDevice | bytes)
        dtype = np.dtype(code) if is_named else np.asarray(buffer).dtype
        kind = "" if dtype.itemsize == 1 else dtype.name
        meaning = found(buffer, form, n)
        assert meaning == wanted(buffer, form, n, dtype.itemsize, kind), name
        assert found(buffer, form, n, writable=True) == (meaning if receives(buffer) else None), (
            name
        )


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("form", ["", "B", "V"])
@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "complex32"])
def test_a_tensor_whose_type_numpy_lacks_is_bytes(kind: str, form: str) -> None:
    """mpi4py refuses complex32."""
    tensor = torch.arange(8.0).to(getattr(torch, kind))
    for buffer in (tensor, Exported("__dlpack__", tensor), tensor[:0], tensor[::2], [tensor, 4]):
        assert found(buffer, form, 2) == wanted(buffer, form, 2, 1, "")
    assert (found(tensor, form, 2) is None) == (kind == "complex32")


def test_an_unknown_type_on_a_device_is_named() -> None:
    """Then only mpi4py knows the length of a message."""
    with pytest.raises(KeyError, match=r"no datatype of MPI is \|V8"):
        read(OnDevice(np.zeros(4, "V8")), "", 1)


@pytest.mark.parametrize("form", ["", "B", "V"])
@pytest.mark.parametrize("n", [1, 2])
def test_there_may_be_no_buffer(form: str, n: int) -> None:
    """A datatype may hold the address of the memory."""
    data, kind = memory(), "float64"
    absolute = MPI.Datatype.Create_struct([2], [MPI.Get_address(data)], [DOUBLE]).Commit()
    for spec, size in (([None, 0, DOUBLE], 8), ([MPI.BOTTOM, 1, absolute], 16)):
        known = wanted(spec, form, n, size, kind, gaps=True)
        assert known is not None
        assert found(spec, form, n) == known
    absolute.Free()
    short = [np.zeros(1, "u1"), [MPI.BYTE] * n]
    assert found(short, "W", n) == wanted(short, "W", n, 1, "")


@pytest.mark.parametrize(
    ("spec", "form", "said"),
    [
        ([SIX], "", "a message is a buffer, or 2 to 4 items, not 1"),
        ([SIX, 1, 0, None, None], "", "a message is a buffer, or 2 to 4 items, not 5"),
        ([SIX, (1,)], "", r"\(1,\) are not a count or counts, and displacements"),
        ([SIX, [1, 1, 1]], "V", "3 counts and 3 displacements for 2 ranks"),
        ([SIX, ([1, 1], [0, 3, 4])], "V", "2 counts and 3 displacements for 2 ranks"),
        (SIX[:5], "B", "40 bytes are not 2 blocks of elements of 8 bytes"),
        ([SIX[:3], PAIR], "", "24 bytes are not 1 blocks of elements of 16 bytes"),
        (
            [SIX, ([4, 5], [0, 2])],
            "V",
            "5 elements from byte 16 on, but the buffer has 48 bytes. C",
        ),
        ([SIX, ([4, -2], [0, 2])], "V", r"-2 elements from byte 16 on.* \(in all 2 elements\) or "),
        ([SIX, GAPS["backwards"][0]], "V", "a datatype of extent -8 needs counts"),
        ([SIX, MPI.DATATYPE_NULL], "", "the datatype is null"),
        ([SIX, "zz"], "", "zz"),
        (
            [SIX, ([1, 1], None), [DOUBLE] * 2],
            "W",
            "pass counts and displacements, or neither; a b",
        ),
        ([None, [DOUBLE] * 2], "W", "neither; a buffer of unknown length needs both"),
        (SIX[::2], "", r"a buffer of shape \(3,\) and strides \(16,\) is not contiguous. Pass"),
        (np.zeros(2, ">f8"), "", "no datatype of MPI is >f8"),
        (None, "", "a message without a buffer needs a datatype, got None alone"),
    ],
)
def test_why_a_specification_is_refused_is_told(spec: Any, form: str, said: str) -> None:
    with pytest.raises((TypeError, ValueError, KeyError), match=said):
        read(spec, form, 2)
