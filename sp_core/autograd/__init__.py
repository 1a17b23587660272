"""Differentiable collectives.

The loss convention, for everything in this package: every rank has a loss of its own, and what is differentiated is their SUM over
the ranks. A collective is then a linear map from all shards to all results, and its backward is the transpose of that map:

    all_gather     <-> reduce_scatter       all_to_all <-> all_to_all, split and concat swapped
    all_reduce     <-> all_reduce           broadcast  <-> reduce           shift <-> shift the other way

Tensor parallelism also has values that all ranks hold alike and that count once. Three functions say where such a value begins or
ends; a self-adjoint all_reduce there would multiply gradients by the number of ranks:

    copy_to_group      identity    forward, all_reduce backward      one value becomes a copy for every rank
    reduce_from_group  all_reduce  forward, identity   backward      partial sums become one value
    gather_replicated  all_gather  forward, own slice  backward      shards become one value

Each function compares its arguments over the ranks before it sends anything, unless the mesh was made with `check="off"`. The
backward of a collective is a collective: it runs on a rank only if that rank's result is used, so use it on all ranks or on
none. Before a backward the ranks compare which backward each is about to run, unless the mesh was made with `check="off"`.
The collectives of one backward run in the reverse order of their calls; a started one counts where it was started.
"""

from sp_core.autograd.apply import Pending
from sp_core.autograd.replicated import copy_all_to_group, copy_to_group, gather_replicated, reduce_from_group
from sp_core.autograd.sharded import (
    all_gather,
    all_gather_start,
    all_reduce,
    all_reduce_start,
    all_to_all,
    all_to_all_start,
    broadcast,
    broadcast_start,
    reduce,
    reduce_scatter,
    reduce_scatter_start,
    shift,
    shift_start,
)

__all__ = [
    "Pending",
    "all_gather",
    "all_gather_start",
    "all_reduce",
    "all_reduce_start",
    "all_to_all",
    "all_to_all_start",
    "broadcast",
    "broadcast_start",
    "copy_all_to_group",
    "copy_to_group",
    "gather_replicated",
    "reduce",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_start",
    "shift",
    "shift_start",
]
