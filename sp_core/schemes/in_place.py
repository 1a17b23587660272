"""Exchange keys, values and their gradients through shared memory, without messages.

The ring and AllGather-KV use this module if `reads_in_place` says so. The ring then does this:

    step 0     rank r copies its keys and values that other ranks see to shared memory, and attends
               to k_r and v_r
    fence      all ranks have written
    step s     rank r reads the block (keys and values) of rank j = r - s in place; in the backward
               it adds its gradient to the sum of dk_j and dv_j, also in shared memory, after rank
               r - 1 has added its gradient in step s - 1

If k and v are in shared memory already (`Problem.resident`), step 0 copies nothing. Every sum has
the same addends in the same order as a ring with messages, so the results are equal bit for bit.
Results of AllGather-KV may differ in rounding. Here its keys and values are contiguous by head, in
messages by token, and matrix products of other strides may round differently.
Shapes: B batch, S sequence, K key/value heads, D head dim, P ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from sp_core.communicator import Communicator
from sp_core.schemes.problem import KeyValue, Problem
from sp_core.transport import Done, Handle, Regions, Spec, Window, wait


def may_share(comm: Communicator, op: str) -> bool:
    """Return whether the ranks share memory, and the collective `op` is allowed to use it.

    Args:
        comm: the communicator of the ranks.
        op: name of the collective, such as "shift"; allowed if its algorithm on `comm` is "auto" or
            "window".
    """
    return comm.window is not None and comm.algorithms[op] in ("auto", "window")


def reads_in_place(comm: Communicator, op: str) -> bool:
    """Return whether ranks read each other's tensors in shared memory, and call no collective `op`.

    Return False for a single rank, and for ranks without shared memory. Return False for memory of
    devices, too: there a kernel could read before the owner has written.

    Args:
        comm: the communicator of the ranks.
        op: name of the collective that would send the tensors otherwise, such as "shift".
    """
    has_regions = comm.window is not None and comm.window.has_regions
    return comm.size > 1 and has_regions and may_share(comm, op)


def blocks_in_place(k: Tensor, v: Tensor, problem: Problem) -> Iterator[tuple[int, int, KeyValue]]:
    """Yield each rank's keys and values in the order of the ring, own first, without a message.

    A block is valid until the next one is asked for. All ranks iterate to the end. They wait for
    each other before the second block. If k and v are read where the caller put them
    (`Problem.resident`), the ranks wait once more after the last block.

    Yields:
        (step, rank that owns the block, (k, v) of (B, S_block, K, D) each). From step 1 on, k
        and v have only the keys that ranks other than the owner see (`Problem.shown`).
    """
    comm, shown, k, v = problem.comm, problem.shown, k.detach(), v.detach()
    blocks, written = (_resident if problem.resident else _written)(k, v, problem)
    # contiguous on every rank, so that the kernels round alike
    yield 0, comm.rank, (k.contiguous(), v.contiguous())
    comm.wait(written, "ring")
    for step in range(1, max(problem.hops) + 1):
        owner = (comm.rank - step) % comm.size
        held = blocks[owner]
        if problem.resident:
            held = held[0][:, shown.of(owner)], held[1][:, shown.of(owner)]
        if problem.sees(owner):
            _count(comm, held)
        yield step, owner, held
    if problem.resident:
        comm.fence()  # then all ranks have read k and v, and the caller may change them


def _written(k: Tensor, v: Tensor, problem: Problem) -> tuple[Sequence[KeyValue], Handle]:
    """Copy this rank's keys and values that other ranks see into shared memory.

    Returns:
        For each rank its keys and values that other ranks see, as views of shared memory; and a
        handle that completes when every rank has written.
    """
    comm, window = problem.comm, _window(problem)
    region = _enter(window.blocks, _specs(k, problem), comm)
    mine = problem.shown.of(comm.rank)
    writes = [
        partial(into.copy_, x[:, mine]) for into, x in zip(region[comm.rank], (k, v), strict=True)
    ]
    what = f"blocks of {problem.kv_sharding.fingerprint} in place"
    wait(window.start([writes], what), comm.poll, comm.look)
    return region, _fence(problem)


def _specs(like: Tensor, problem: Problem) -> list[Spec]:
    """Return shape and dtype of a block, in one tensor, of the keys of each rank that others see.

    `like` is any tensor (B, *, K, D) of their dtype.
    """
    batch, _, *head = like.shape
    return [((2, batch, length, *head), like.dtype) for length in problem.shown.lengths]


def _resident(k: Tensor, v: Tensor, problem: Problem) -> tuple[Sequence[KeyValue], Handle]:
    """Return the blocks of all ranks as views of the tensors that their owners passed.

    Returns:
        The block of each rank; a handle that completes when every rank has reached this point.
    """
    batch, _, heads, head_dim = k.shape
    window, lengths = _window(problem), problem.kv_sharding.lengths

    def of_all(x: Tensor) -> list[Tensor]:
        places = zip(window.peers(x.view(-1)), lengths, strict=True)
        return [
            place[: batch * length * heads * head_dim].view(batch, length, heads, head_dim)
            for place, length in places
        ]

    return list(zip(of_all(k), of_all(v), strict=True)), _fence(problem)


def whole(k: Tensor, v: Tensor, problem: Problem) -> KeyValue:
    """Gather k and v of all ranks in shared memory, and wait until all ranks have written theirs.

    Every rank calls this, and writes only its own tokens.

    Returns:
        k and v, (B, K, S, D) each, tokens in the order of `kv_sharding.sorted_positions`. They are
        views of shared memory that are valid until the next call.
    """
    comm, window, sharding = problem.comm, _window(problem), problem.kv_sharding
    batch, _, heads, head_dim = k.shape
    shape = (2, batch, heads, sharding.seq_len, head_dim)
    (region,) = _enter(window.blocks, [(shape, k.dtype)], comm)
    ranges = sharding.sorted_ranges(comm.rank)
    writes = [
        partial(into[:, :, place.start : place.stop].copy_, part)
        for into, x in zip(region, (k, v), strict=True)
        for place, part in zip(
            ranges, x.detach().transpose(1, 2).split(list(map(len, ranges)), 2), strict=True
        )
    ]
    written = window.start([writes, []], f"keys and values of {sharding.fingerprint} in place")
    comm.wait(comm.track(written), "all_gather")
    others = [
        length for rank, length in enumerate(sharding.lengths) if length and rank != comm.rank
    ]
    comm.counters["all_gather"].add(
        messages=len(others), bytes_sent=sum(others) * region[..., :1, :].nbytes
    )
    return region


class SharedSums:
    """Sum the gradients of each block's keys and values in shared memory.

    Call `add` once in every step of the ring, then `arrived`, on every rank. `ring.TravellingSums`
    does the same with messages.

    Args:
        problem: the attention call.
        like: any tensor (B, *, K, D) with the dtype of the sums.
    """

    def __init__(self, problem: Problem, like: Tensor) -> None:
        self._problem, self._like = problem, like[:, :0]
        self._shown = problem.shown.of(problem.comm.rank)
        self._sums: list[Tensor] = []
        self._mine: KeyValue = self._like, self._like
        self._adding: Handle = Done()

    def add(self, step: int, own: KeyValue | None, keys: slice) -> None:
        """Start to add this rank's gradient of one block to the sum of the block's gradients.

        In step s the block is the keys and values of rank r - s, on rank r.

        First wait for this rank's addition of the previous step. The new addition begins when all
        ranks have called `add` for this step, so every addition of the previous step is done. Step
        0 begins likewise: every rank has then read its sums of the previous backward, which the new
        sums may overwrite.

        Args:
            step: the step of the ring. Step 0 starts the sum of this rank's own block.
            own: gradients of k and v, (B, S_keys, K, D) each; None if no query of this rank sees
                the block. In step 0 `arrived` returns these tensors.
            keys: the indices of these S_keys keys in the block; in step 0 all keys.
        """
        comm = self._problem.comm
        comm.wait(self._adding, "ring")
        work = []
        if step == 0:
            work = self._begin(own)
        elif own is not None:
            total = self._sums[(comm.rank - step) % comm.size]
            _count(comm, total)
            work = [partial(x[:, keys].add_, y) for x, y in zip(total, own, strict=True)]
        self._adding = comm.track(_window(self._problem).start([[], work], "gradients in place"))

    def _begin(self, own: KeyValue | None) -> list[Callable[[], object]]:
        """Return the copies that start the sums of this rank's own block: `own`, or zeros.

        Gradients of keys that other ranks see are summed in shared memory.
        """
        problem, rank = self._problem, self._problem.comm.rank
        self._sums = _enter(_window(problem).sums, _specs(self._like, problem), problem.comm)
        length = problem.kv_sharding.local_len(rank)
        self._mine = zeros(self._like, length) if own is None else own
        return [
            partial(shared.copy_, x[:, self._shown])
            for shared, x in zip(self._sums[rank], self._mine, strict=True)
        ]

    def arrived(self) -> KeyValue:
        """Wait until all ranks have added their gradients. Return dk and dv of this rank's tokens.

        dk and dv are (B, S_block, K, D) each, and do not lie in shared memory.
        """
        comm = self._problem.comm
        for handle in (self._adding, _fence(self._problem)):
            comm.wait(handle, "ring")
        for shared, x in zip(self._sums[comm.rank], self._mine, strict=True):
            x[:, self._shown] = shared
        return self._mine


def zeros(like: Tensor, length: int) -> KeyValue:
    """Return zeros as the gradients of `length` keys and values, (2, B, length, K, D).

    `like` is any tensor (B, *, K, D) of their dtype, on their device.
    """
    batch, _, *head = like.shape
    return like.new_zeros((2, batch, length, *head))


def _window(problem: Problem) -> Window:
    """Return the shared memory of the ranks; `reads_in_place` has checked that there is one."""
    assert problem.comm.window is not None
    return problem.comm.window


def _enter(regions: Regions, specs: Sequence[Spec], comm: Communicator) -> list[Tensor]:
    """Return tensors in the next region of shared memory. All ranks agree before a new one."""
    return regions.enter(specs, lambda: comm.agree_on(lambda: f"new shared memory of {comm.name}"))


def _fence(problem: Problem) -> Handle:
    """Return a handle that completes when every rank has reached this point."""
    return problem.comm.track(_window(problem).start([[], []], "fence of blocks in place"))


def _count(comm: Communicator, block: KeyValue) -> None:
    """Count a block read from another rank's memory as one message of the ring."""
    comm.counters["ring"].add(messages=1, bytes_sent=sum(x.nbytes for x in block))
