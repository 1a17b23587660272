"""The base class of the keys of caches: `Mask` and `Sharding`."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class HashedOnce:
    """Compute the hash of a frozen dataclass once: caches look it up in every step of a ring.

    A subclass repeats `__hash__ = HashedOnce.__hash__`, because `dataclass` would make another one.
    """

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields only: in another process the hash of Python 3.11 may differ."""
        return type(self), self._values

    @property
    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))
