"""Test shardings: views of consecutive tokens, even work, chunks and fingerprints."""

import pickle
from functools import cache
from itertools import product, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from oracle.strategies import DRAWN
from torch import Tensor

from sp_core.mask import Mask
from sp_core.segments import deal_chunks
from sp_core.sharding import Sharding


@given(st.integers(0, 70), st.integers(1, 9), st.sampled_from([0, 17]))
def test_consecutive_tokens_are_a_view(seq_len: int, size: int, start: int) -> None:
    """A shard shares memory with the sequence, because copies of long sequences cost too much."""
    x, made = torch.empty(2, seq_len), [Sharding.contiguous(seq_len, size, start)]
    if seq_len <= size:  # each rank has one token at most
        made.append(Sharding.striped(seq_len, size, start))
    for sharding, rank in product(made, range(size)):
        shard = sharding.shard(x, rank, 1)
        assert not shard.numel() or shard._is_view()


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
def test_sums_of_numbers_of_numpy_do_not_wrap(layout: str, kind: Any) -> None:
    """Most sums and products of these numbers are beyond the narrow types."""
    most = min(int(np.iinfo(kind).max), 250)
    named: Any = {"mask": Mask(causal=True), "chunk": 2} if layout == "balanced" else {}
    mine = {name: kind(value) if name == "chunk" else value for name, value in named.items()}
    for numbers in ((most, most, most), (most, 2, 0), (0, most, most)):
        made = getattr(Sharding, layout)(*map(kind, numbers[:2]), start=kind(numbers[2]), **mine)
        assert made == getattr(Sharding, layout)(*numbers[:2], start=numbers[2], **named)
        ends = {type(end) for owned in made.segments for s in owned for end in (s.start, s.stop)}
        assert ends <= {int}


@cache
def work_of(mask: Mask, length: int) -> Tensor:
    """Count the keys that each token sees."""
    return mask.allowed(range(length), range(length)).sum(1)


def loads(sharding: Sharding, mask: Mask) -> list[int]:
    """Count the visible pairs of each rank."""
    work = work_of(mask, sharding.seq_len)
    return [int(work[sharding.positions(rank)].sum()) for rank in range(sharding.size)]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    "mask",
    [
        Mask(causal=True),
        Mask(causal=True, window=64),
        Mask(causal=True, documents=(0, 700, 800, 2000, 2050, 4096)),
        Mask(causal=True, documents=(0, 1, 2500, *range(2600, 4096, 17), 4096)),
        Mask(causal=True, documents=(0, 2048, *range(2064, 4097, 16))),
    ],
    ids=["causal", "window", "few documents", "many documents", "one long document"],
)
def test_chunks_are_chosen_so_that_work_is_even_within_2_percent(mask: Mask, size: int) -> None:
    work = loads(Sharding.balanced(4096, size, mask), mask)
    assert max(work) * size <= 1.02 * sum(work)


def test_a_last_chunk_that_is_short_and_heavy_is_dealt_last() -> None:
    assert sorted(Sharding.balanced(11, 2, Mask(causal=True), chunk=4).lengths) == [4, 7]
    alone = Sharding.balanced(11, 1, Mask(causal=True), chunk=1)
    assert alone.segments == ((range(11),),)  # adjacent chunks are joined


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("chunk", [3, 5, 8])
def test_the_work_of_ranks_differs_as_that_of_two_chunks_of_one_round(
    size: int, chunk: int
) -> None:
    for seq_len in range(size, 12 * size):
        costs = [
            sum(range(start + 1, min(start + chunk, seq_len) + 1))
            for start in range(0, seq_len, chunk)
        ]
        hands, _ = deal_chunks(torch.arange(1, seq_len + 1).cumsum(0), size, chunk)
        dealt = [[costs[number] for number in hand] for hand in hands]
        work = [*map(sum, dealt)]
        rounds = zip_longest(*dealt, fillvalue=0)
        assert max(work) - min(work) <= max(max(costs) - min(costs) for costs in rounds), seq_len


@pytest.mark.parametrize("bounds", [(0, 3000, 4096), (0, 700, 800, 2000, 2050, 4096)])
def test_chunks_are_halved_only_until_the_work_is_even(bounds: tuple[int, ...]) -> None:
    """Kernels are fast on long runs of positions, so chunks stay as long as possible."""
    mask = Mask(causal=True, documents=bounds)
    lengths = [512 >> halved for halved in range(5)]
    made = [Sharding.balanced(4096, 4, mask, chunk=length) for length in lengths]
    even = [max(loads(x, mask)) * 4 <= 1.02 * sum(loads(x, mask)) for x in made]
    assert not even[0]
    assert Sharding.balanced(4096, 4, mask) == made[even.index(True)]


@pytest.mark.parametrize(("seq_len", "chunk"), [(128, 32), (132, 17)])
def test_chunks_of_32_tokens_are_not_halved_even_if_the_work_is_uneven(
    seq_len: int, chunk: int
) -> None:
    mask = Mask(causal=True, documents=(0, 64, *range(65, seq_len + 1)))
    made = Sharding.balanced(seq_len, 2, mask)
    assert made == Sharding.balanced(seq_len, 2, mask, chunk=chunk)
    assert max(loads(made, mask)) * 2 > 1.02 * sum(loads(made, mask))


def test_work_is_that_of_keys_in_documents_of_other_lengths() -> None:
    mask = Mask(documents=(0, 2, 4, 6, 8), kv_documents=(0, 1, 31, 32, 62))
    made, work = Sharding.balanced(8, 2, mask, chunk=2), mask.allowed(range(8), range(62)).sum(1)
    assert [int(work[made.positions(rank)].sum()) for rank in range(2)] == [62, 62]


@pytest.mark.parametrize(("work", "even"), [([510, 490], True), ([511, 489], False)])
def test_work_is_even_if_no_rank_has_more_than_102_percent(work: list[int], even: bool) -> None:
    assert deal_chunks(torch.tensor(work).cumsum(0), 2, 1) == ([[0], [1]], even)


def test_zigzag_is_what_causal_work_needs() -> None:
    made, zigzag = Sharding.balanced(4096, 4, Mask(causal=True)), Sharding.zigzag(4096, 4)
    for rank in range(4):
        assert made.positions(rank).tolist() == zigzag.positions(rank).tolist()
    assert Sharding.balanced(4096, 4, Mask()) == Sharding.balanced(4096, 4, Mask(), chunk=512)


def test_a_restored_tensor_is_new_and_may_learn_after_one_of_inference_mode() -> None:
    """What a sharding keeps is no inference tensor, even if inference mode needs it first."""
    x, made = torch.arange(6.0), Sharding.zigzag(6, 2)
    shards = [made.shard(x, rank, 0) for rank in range(2)]
    with torch.inference_mode():
        made.unshard(shards, 0)
        kept = made.positions(0), made.sorted_positions
    assert [places.is_inference() for places in kept] == [False, False]
    whole = made.unshard([shard.requires_grad_() for shard in shards], 0)
    whole.sum().backward()
    assert [shard.grad.tolist() for shard in shards if shard.grad is not None] == [[1.0] * 3] * 2
    assert Sharding.contiguous(6, 1).unshard([x], 0).add_(1).tolist() == (x + 1).tolist()
    assert Sharding.contiguous(6, 2).restore(x, 0) is x  # its tokens are in order
    assert x.tolist() == [*range(6)]


def test_work_of_a_million_tokens_is_even() -> None:
    made, length = Sharding.balanced(1 << 20, 4, Mask(causal=True)), 1 << 20
    work = [int((made.positions(rank) + 1).sum()) for rank in range(4)]
    assert max(work) * 4 <= 1.02 * length * (length + 1) / 2


def test_fingerprints_tell_shardings_apart() -> None:
    different = [layout(24, 3) for layout in DRAWN.values()] + [
        Sharding.contiguous(25, 3),
        Sharding.contiguous(24, 3, 1),
        *(Sharding.from_positions(owned) for owned in ([[0], [1], [2]], [[0], [2], [1]])),
        *(Sharding.from_positions([[*range(0, 3 * n, n)], [9]]) for n in (1, 2)),
        *(Sharding.from_positions([own]) for own in ([0, 1, 5, 6], [5, 6, 0, 1])),
        *(Sharding.from_positions([[0], *rest]) for rest in ([[4], []], [[], [4]])),
    ]
    assert len({sharding.fingerprint for sharding in different}) == len(different)
    assert Sharding.zigzag(24, 3).fingerprint == Sharding.zigzag(24, 3).fingerprint


@pytest.mark.parametrize("made", [lay(n, 3) for lay in DRAWN.values() for n in range(8)])
def test_equal_shardings_are_equal_everywhere(made: Sharding) -> None:
    """That is: in agreements of ranks, and in dicts of another process."""
    copy = Sharding.from_positions([made.positions(rank).tolist() for rank in range(3)])
    new = pickle.dumps(made)
    if copy == made:
        assert (copy.fingerprint, hash(copy)) == (made.fingerprint, hash(made))
    made.unshard([made.shard(torch.zeros(made.end), rank, 0) for rank in range(3)], 0)
    assert pickle.dumps(made) == new  # without what is computed once: its hash is this process's
    assert hash(pickle.loads(new)) == hash(made)
