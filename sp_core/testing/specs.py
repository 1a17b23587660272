"""Read buffer specifications as mpi4py does.

A specification is a buffer, or a list such as [buffer, counts, displacements, datatype]. `read`
returns how many elements of which type go to each rank, and from where.
"""

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import index
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Part(NamedTuple):
    """One rank's part of a buffer: bytes that go to this rank, or come from it.

    Args:
        nbytes: number of bytes.
        kind: name of the element type, "" for bytes.
        view: the elements as an array if they are numbers without gaps, else None.
    """

    nbytes: int
    kind: str
    view: Array | None = None


class Spec(NamedTuple):
    """The meaning of a buffer specification of mpi4py, as `read` returns it.

    Args:
        counts: number of elements for each rank.
        parts: for each rank its part of the buffer.
        text: describes the specification in error messages, such as "4 x float64".
    """

    counts: tuple[int, ...]
    parts: tuple[Part, ...]
    text: str


class _Element(NamedTuple):
    """A buffer and the type of its elements.

    Args:
        data: the buffer as bytes.
        size: bytes of data in an element.
        extent: bytes from one element to the next.
        kind: name of the element type, "" for bytes.
        dtype: NumPy's type of the elements if they are numbers without gaps, else None.
    """

    data: Array
    size: int
    extent: int
    kind: str
    dtype: np.dtype[Any] | None


def require(condition: bool, problem: str) -> None:
    """Raise a ValueError with the text `problem` unless the condition holds.

    The caller builds the text also if the condition holds: use it for short texts only.
    """
    if not condition:
        raise ValueError(problem)


def read(spec: Any, form: str, n: int, *, writable: bool = False) -> Spec:
    """Read a buffer specification: find which bytes of the buffer are for each rank.

    Args:
        spec: a buffer, or a list of it with counts, displacements and a datatype.
        form: "B" if the buffer has a block for each rank, "V" if counts are given, "W" if counts
            and datatypes are given; "" if the buffer is a single block.
        n: number of ranks.
        writable: whether something is received into the buffer.

    Raises:
        ValueError, TypeError, KeyError: mpi4py would not take `spec` either, or the counts do not
            fit the buffer.
    """
    buffer, counts, displs, types = _items(spec, form)
    elements = [_element(buffer, each, writable) for each in (types if form == "W" else [types])]
    counts, displs = _places(counts, displs, elements[0], form, n)
    elements = elements if form == "W" else elements * len(counts)
    require(
        len(counts) == len(displs) == len(elements) == (n if form else 1),
        f"{len(counts)} counts and {len(displs)} displacements for {n} ranks",
    )
    parts = []
    for element, count, displ in zip(elements, counts, displs, strict=True):
        start = displ * (1 if form == "W" else element.extent)
        nbytes = count * element.size
        inside = element.data[start : start + nbytes]
        if count < 0 or (element.dtype is not None and inside.size < nbytes):
            raise ValueError(
                f"a part has {count} elements from byte {start} on, but the buffer has "
                f"{element.data.size} bytes. Correct the counts (in all {sum(counts)} elements) or "
                "the displacements."
            )
        view = None if element.dtype is None else inside.view(element.dtype)
        parts.append(Part(nbytes, element.kind, view))
    shown: Any = {"V": list(counts), "W": [part.nbytes for part in parts]}.get(form, counts[0])
    return Spec(tuple(counts), tuple(parts), f"{shown} x {elements[0].kind or 'byte'}")


def array(buffer: Any) -> Array:
    """Return the memory of a buffer as a flat array.

    Raises:
        ValueError: it is not contiguous, so MPI would take its elements in a different order.
        TypeError: it gives no access to memory.
    """
    flat = _memory(buffer)
    if not flat.flags.forc:
        raise ValueError(
            f"a buffer of shape {flat.shape} and strides {flat.strides} is not contiguous. Pass a "
            "contiguous copy."
        )
    return flat.ravel(order="A")


def _memory(buffer: Any) -> Array:
    """Return a NumPy array over the memory of an object.

    The object is an array or a tensor, has Python's buffer protocol, or lives on a device. Of
    memory on a device only address, size and dtype may be used.
    """
    on_device = None
    with suppress(AttributeError, KeyError):  # the latter from torch, for float8
        on_device = buffer.__cuda_array_interface__
    if on_device is None and not hasattr(buffer, "__dlpack__"):
        return np.asarray(memoryview(buffer))  # `__array__` may give a copy
    if on_device is None and hasattr(buffer, "__array__"):
        with suppress(TypeError):  # NumPy lacks some types of torch
            return np.asarray(buffer)
    from mpi4py.MPI import buffer as memory

    kind = "V" if on_device is None else on_device["typestr"]
    # torch describes bfloat16 as "V2", and gives no description of float8
    if "V" in kind and hasattr(buffer, "__dlpack__"):
        kind = _type_of_tensor(buffer)
    return np.asarray(memory(buffer)).view(kind)


def _type_of_tensor(tensor: Any) -> str:
    """Return the element type of a DLPack tensor as NumPy names it, such as "f4".

    In the DLPack structure it lies behind the data pointer, the device and the number of
    dimensions. bfloat16 and shorter floats are "S1", because mpi4py sends them as bytes.
    """
    on_host = tensor.__dlpack_device__()[0] == 1
    capsule = tensor.__dlpack__(**({} if on_host else {"stream": -1}))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    described = ctypes.string_at(pointer(capsule, b"dltensor") + 20, 4)
    code, bits, lanes = struct.unpack("=BBH", described)
    if code in (3, 4) or code > 6:  # opaque, bfloat16, or fewer bits
        return "S1"
    return f"{'c' if lanes == 2 else 'iuf--cb'[code]}{bits * lanes // 8}"


def _items(spec: Any, form: str) -> tuple[Any, Any, Any, Any]:
    """Return buffer, counts, displacements and datatype of a specification, None if not given.

    `form` is as in `read`; for "W" the last item is a datatype for each rank. Raise ValueError if
    there are not 2 to 4 items, or if a pair of counts and displacements has another length.
    """
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    require(2 <= len(spec) <= 4, f"a message is a buffer, or 2 to 4 items, not {len(spec)}")
    buffer, *middle, last = spec
    if (
        form != "W"
        and len(spec) == 2
        and not (isinstance(last, str) or hasattr(last, "Get_extent"))
    ):
        middle, last = [last], None
    pair = (tuple,) if form == "V" else (tuple, list)
    if len(middle) == 1 and (form == "W" or isinstance(middle[0], pair)):
        (middle,) = middle
        require(len(middle) == 2, f"{middle} are not a count or counts, and displacements")
    return buffer, *[*middle, None, None][:2], last


def _element(buffer: Any, datatype: Any, writable: bool) -> _Element:
    """Return a buffer with its element type: that of `datatype`, else that of the buffer."""
    known = buffer is not None and type(buffer).__name__ != "BottomType"
    if not known and datatype is None:
        raise TypeError(f"a message without a buffer needs a datatype, got {buffer!r} alone")
    data = array(buffer) if known else np.empty(0, np.uint8)
    require(
        not writable or data.flags.writeable,
        "a buffer to receive into is read-only, as NumPy's scalars are. Pass a writable array.",
    )
    if isinstance(datatype, str):
        from mpi4py.MPI import Datatype

        try:
            datatype = Datatype.fromcode(datatype)
        except ValueError as unknown:
            raise KeyError(str(unknown)) from None
    if datatype is not None:
        return _typed(data.view(np.uint8), datatype, known)
    if (data.dtype.kind not in "?biufc" and data.dtype != "S1") or not data.dtype.isnative:
        raise KeyError(f"no datatype of MPI is {data.dtype}")
    return _Element(
        data.view(np.uint8), data.itemsize, data.itemsize, _kind(data.dtype), data.dtype
    )


def own_comm() -> Any:
    """Return mpi4py's communicator of this rank alone.

    A program may have put a checked communicator in the place of `MPI.COMM_SELF`.
    """
    from mpi4py.MPI import COMM_SELF

    return getattr(COMM_SELF, "_raw", COMM_SELF)


def _typed(data: Array, datatype: Any, known: bool) -> _Element:
    """Describe the elements of a buffer that is passed with a datatype of MPI.

    `known` is False for MPI.BOTTOM: the datatype then holds absolute addresses, and there is no
    buffer to read.
    """
    require(bool(datatype), "the datatype is null")
    if not datatype.is_predefined:
        own_comm().Send_init([bytearray(1), 1, datatype], 0).Free()  # raises if not committed
    size, (lower, extent) = datatype.Get_size(), datatype.Get_extent()
    leaves = set(_leaves(datatype))
    plain = known and size == extent and lower == 0 and len(leaves) == 1
    return _Element(
        data, size, extent, ",".join(sorted(map(_kind, leaves))), leaves.pop() if plain else None
    )


def _leaves(datatype: Any) -> Iterator[np.dtype[Any]]:
    """Yield the NumPy type of each basic datatype of which an MPI datatype is made."""
    if datatype.is_predefined:
        yield np.dtype(datatype.typestr)
        return
    base, _, made_of = datatype.decode()
    for inner in made_of.get("datatypes", [base]):
        yield from _leaves(inner)
        if not inner.is_predefined:
            inner.Free()


def _kind(dtype: np.dtype[Any]) -> str:
    """Return the name of a type of numbers; "" for bytes, which match every type."""
    return "" if dtype.itemsize == 1 else dtype.name


def _places(
    counts: Any, displs: Any, element: _Element, form: str, n: int
) -> tuple[list[int], list[int]]:
    """Return the number of elements for each rank, and where they begin in the buffer.

    The beginnings are in extents of the datatype; for form W in bytes.
    """
    given = counts is not None
    if form == "W":
        require(
            given is (displs is not None) and (given or element.data.size > 0),
            "pass counts and displacements, or neither; a buffer of unknown length needs both",
        )
        sizes, starts = (counts, displs) if given else ([1] * n, [0] * n)
        return [*map(index, sizes)], [*map(index, starts)]
    require(given or element.extent > 0, f"a datatype of extent {element.extent} needs counts")
    length = element.data.size // max(element.extent, 1)
    if form == "V":
        counts = (
            _repeated(counts, [1] * n)
            if given
            else [length // n + (length % n > i) for i in range(n)]
        )
        displs = [0, *accumulate(counts[:-1])] if displs is None else _repeated(displs, range(n))
        return counts, displs
    blocks, first = (n if form == "B" else 1), index(displs or 0)
    require(
        given or not (element.data.size % element.extent or (length - first) % blocks),
        f"{element.data.size} bytes are not {blocks} blocks of elements of {element.extent} bytes",
    )
    count = index(counts) if given else (length - first) // blocks
    return [count] * blocks, [first + i * count for i in range(blocks)]


def _repeated(given: Any, steps: Sequence[int]) -> list[int]:
    """Return `given` if it is a list of numbers, else the number multiplied by each of `steps`."""
    return [*map(index, given)] if np.ndim(given) else [index(given) * step for step in steps]
