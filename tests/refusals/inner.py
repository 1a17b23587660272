"""List wrong results of a user's attention inside Ulysses, with the error expected of each."""

from collections.abc import Callable
from typing import Any

from refusals.calls import Row, Table, Wrong, attention
from refusals.kinds import sending
from torch import Tensor

import sp_core as sp


def refined(
    change: Callable[[Tensor, Tensor], Any], *, everywhere: bool, return_lse: bool
) -> Wrong:
    """Return a call of Ulysses with a changed result of `inner`, on all ranks or on the last."""

    def wrong(mesh: sp.Mesh, here: bool) -> object:
        def inner(*given: Any, **named: Any) -> Any:
            found: Any = sp.local_attention(*given, **named)
            return change(*found) if here or everywhere else found

        return attention(
            mesh, sp.ulysses_attention, inner=inner, return_lse=return_lse, learns=not everywhere
        )

    return sending(wrong)


RESULTS: dict[str, tuple[type[Exception], str, Callable[[Tensor, Tensor], Any]]] = {
    "nothing": (sp.ShapeError, "inner returned NoneType", lambda out, lse: None),
    "out alone": (sp.ShapeError, "inner returned (2, 12, ", lambda out, lse: out),
    "a list": (sp.ShapeError, "), NoneType for q (2, 12, ", lambda out, lse: [out, None]),
    "three": (sp.ShapeError, "returned (2, 12, ", lambda out, lse: (out, lse, lse)),
    "too few tokens": (
        sp.ShapeError,
        " two tensors of shapes (2, 12, ",
        lambda out, lse: (out[:, 1:], lse),
    ),
    "another layout": (sp.ShapeError, ", 12, ", lambda out, lse: (out, lse.mT)),
    "another dtype": (sp.DtypeError, "float64", lambda out, lse: (out.double(), lse)),
    "a sparse lse": (
        sp.ShapeError,
        "lse of inner has layout",
        lambda out, lse: (out, lse.to_sparse()),
    ),
    "an error": (ValueError, "no heads", lambda out, lse: int("no heads")),
}
"""Wrong results of a user's attention: the expected error, a part of its text, and the change."""
DIFFERING: dict[str, tuple[type[Exception], str, Callable[[Tensor, Tensor], Any]]] = {
    "another dtype of lse": (sp.CollectiveMismatch, "inner", lambda out, lse: (out, lse.double())),
    "no gradient": (sp.CollectiveMismatch, "inner", lambda out, lse: (out.detach(), lse)),
}
"""Results of a user's attention that are wrong only if other ranks have others."""


def results(table: Any, *, everywhere: bool) -> dict[str, Row]:
    """Return rows in which a user's attention returns a result of the table."""
    return {
        f"{name} from inner, return_lse={return_lse}": (
            kind,
            text,
            refined(change, everywhere=everywhere, return_lse=return_lse),
        )
        for name, (kind, text, change) in table.items()
        for return_lse in (False, True)
    }


EVERYWHERE: Table = {"ring": results(RESULTS, everywhere=True)}
"""Results that are wrong on every rank."""
ON_ONE_RANK: Table = {
    "ring": {
        **results(RESULTS | DIFFERING, everywhere=False),
        "no inner": (
            sp.CollectiveMismatch,
            "inner",
            lambda mesh, here: attention(
                mesh, sp.ulysses_attention, inner=None if here else sp.local_attention
            ),
        ),
    }
}
"""Results that are wrong on the last rank only."""
