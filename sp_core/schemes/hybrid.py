"""Hybrid attention: exchange heads along one axis of a mesh, and run a ring along another.

    (B, S/(R*U), H, D)  --all-to-all over U-->  (B, S/R, H/U, D)  ring over R  --all-to-all over
    U-->  (B, S/(R*U), H, D)

The ranks that differ only in the Ulysses axis exchange heads. Each of them then holds all tokens of
these U ranks for H/U heads, and a ring over the other axis computes the attention. Shapes: B batch,
S sequence, H heads, K key/value heads, D head dim, R ranks along the ring axis and U along the
Ulysses axis.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Unpack

from torch import Tensor

from sp_core.arguments import check_type
from sp_core.attention import Terms
from sp_core.communicator import Communicator
from sp_core.errors import ShapeError
from sp_core.mask import Mask
from sp_core.mesh import Mesh
from sp_core.schemes.problem import check_call, run
from sp_core.schemes.ring import SCHEME
from sp_core.schemes.ulysses import Exchange
from sp_core.sharding import Sharding


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh,
    sharding: Sharding,
    comm: Communicator | None = None,
    axes: tuple[str, str] = ("ring", "ulysses"),
    ulysses: str = "ulysses",
    kv_sharding: Sharding | None = None,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    **terms: Unpack[Terms],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over the tokens of all ranks of two mesh axes.

    The Ulysses axis has U ranks, the ring axis R. `S/(R*U)` stands for this rank's own number of
    tokens, in the order of the sharding.

    Args:
        q: `(B, S/(R*U), H, D)`, this rank's queries; float64, float32, bfloat16 or float16.
        k: `(B, S/(R*U), K, D)`, this rank's keys; H is a multiple of K.
        v: `(B, S/(R*U), K, D)`, this rank's values.
        mesh: a mesh with both axes. All ranks of `mesh[axes]` call this function together, and all
            of them use its results in their losses, or none does.
        sharding: which rank of `mesh[axes]` holds which queries; shards may be uneven or empty.
        comm: `mesh[axes]`, or None for the same. This argument exists for layers that pass every
            scheme a communicator: give them `functools.partial(hybrid_attention, mesh=mesh)`.
        axes: the names of the two axes. The ranks of `sharding` are those of `mesh[axes]`: the axis
            named last varies fastest.
        ulysses: the name of the axis whose ranks exchange heads. The other axis is the ring.
        kv_sharding: which rank holds which keys and values; `sharding` if not given.
        mask: which keys a query sees; all keys if not given.
        softmax_scale: factor of the scores q k^T; 1/sqrt(D) if not given.
        return_lse: also return the log-sum-exp of each query's scores.
        terms: arguments that change the scores further, explained in `Terms`: `softcap`, `sinks`,
            `alibi`.

    Returns:
        out `(B, S/(R*U), H, D)` in the dtype of q; with `return_lse` also lse `(B, H, S/(R*U))` in
        float32 or wider. With sinks, lse includes them. A query that sees no key gets out = 0 and
        lse = -inf; with sinks, its lse is the sink of the head.

    Communication:
        First one agreement: each rank waits for all, and they check that their arguments match. A
        rank's own q has `N = B*(S/(R*U))*H*D` elements, its k and v together
        `M = 2*B*(S/(R*U))*K*D`. In the forward a rank sends `(U-1)/U * (2N + M)` elements in two
        all-to-alls over the Ulysses axis, and R-1 messages of M elements around the ring. The
        details, and the backward, are those of `ulysses_attention` and `ring_attention`.

    Raises:
        TypeError, ValueError, ShapeError, DtypeError, DeviceError, RankError: wrong arguments; on
            every rank, before the first message. Only a wrong `mesh` is an error of one rank.
        CollectiveMismatch: the ranks' arguments differ.
        RuntimeError: autograd is asked for a second derivative; only the first is implemented.

    Source: Fang and Zhao 2024, USP: A Unified Sequence Parallelism Approach, arXiv:2405.07719,
    section 4.
    """
    problem = check_call(
        *(f"hybrid_attention[{axes}, {ulysses}]", q, k, v),
        comm=_product(mesh, axes, ulysses, comm),
        sharding=sharding,
        kv_sharding=kv_sharding,
        mask=mask,
        softmax_scale=softmax_scale,
        return_lse=return_lse,
        **terms,
    )
    ring = axes[0] if axes[1] == ulysses else axes[1]
    groups = groups_of(mesh.axes[axes[0]], mesh.axes[axes[1]], ulysses_fastest=axes[1] == ulysses)
    exchange = Exchange(mesh[ulysses], problem, groups[mesh[ring].rank], q, k)
    inner = replace(
        problem,
        comm=mesh[ring],
        logits=problem.logits.of_heads(exchange.heads[mesh[ulysses].rank]),
        sharding=problem.sharding.group(groups),
        kv_sharding=problem.kv_sharding.group(groups),
        resident=False,  # the all-to-all has put k and v elsewhere
    )
    around = partial(run, problem=inner, scheme=SCHEME)
    out, lse = exchange.run(q, k, v, around, return_lse=return_lse)
    return (out, lse) if return_lse else out


def _product(
    mesh: Mesh, axes: tuple[str, str], ulysses: str, comm: Communicator | None
) -> Communicator:
    """Return the communicator over both axes. Refuse a wrong mesh, axes, `ulysses` or `comm`.

    If one rank's arguments are wrong, all ranks get an error. On a mesh of more than two axes, that
    rank cannot know which axes the other ranks have named. So it makes the next agreement fail on
    every pair of axes.

    Raises:
        TypeError: `mesh` is no mesh; on this rank only.
        ShapeError: wrong axes or `ulysses`, or a `comm` that is not `mesh[axes]`.
    """
    check_type("mesh", mesh, Mesh, "Pass the mesh itself, which has both axes.")

    def refuse() -> str:
        raise ShapeError(
            f"{axes=}, {ulysses=} and {comm=} were given for a mesh with {mesh.axes}. Name two axes"
            " of the mesh, and one of them as ulysses; comm is mesh[axes], or is left out."
        )

    names = list(axes) if isinstance(axes, Sequence) and not isinstance(axes, str) else []
    fits = (
        len(names) == 2
        and names[0] != names[1]
        and all(axis in list(mesh.axes) for axis in names)
        and ulysses in names
    )
    if not fits and len(mesh.axes) > 2:
        for pair in combinations(mesh.axes, 2):
            mesh[pair].decline(f"{axes=}, {ulysses=}")
        refuse()
    product = mesh[axes] if fits else mesh[tuple(mesh.axes)]
    if not fits or (comm is not None and comm is not product):
        product.agree_on(refuse)
    return product


def groups_of(slow: int, fast: int, *, ulysses_fastest: bool) -> list[list[int]]:
    """Return the groups of ranks that exchange heads by Ulysses, one for each place of the ring.

    The ranks are those of `mesh[axes]`, which has two axes.

    Args:
        slow, fast: the number of ranks along the first axis, and along the last one. Rank
            a * fast + b is at a on the first axis and at b on the last.
        ulysses_fastest: whether the last axis exchanges heads; otherwise the first one does.
    """
    if ulysses_fastest:
        return [[ring * fast + rank for rank in range(fast)] for ring in range(slow)]
    return [[rank * fast + ring for rank in range(slow)] for ring in range(fast)]
