"""A LLaMA on any mesh.

Logits, loss, every gradient and the clipped norm are those of one device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from domains.models import Expected
from hypothesis import strategies as st
from llama_cases import Case, cases, mesh_of, meshes, schemes
from oracle import reference
from oracle.once import contents
from oracle.strategies import LAYOUTS
from oracle.ways import Way, ways
from torch import Tensor

from sp_core.llama import Llama
from sp_core.nn.gradients import clip_gradient_norm, placement_of, reduce_gradients
from sp_core.nn.loss import IGNORED, next_token_labels, next_token_loss
from sp_core.testing import event, given

pytestmark = pytest.mark.usefixtures("short_slots")
BATCH = 4


def expected(case: Case, tokens: Tensor, ignored: list[tuple[int, int]]) -> Expected:
    """Logits, loss and the gradient of each weight on one device."""

    def run(rounding: Any, weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = reference.llama(tokens, weights, rounding=rounding, **case.options())
        loss = reference.next_token_loss(logits, tokens, ignored)
        return loss, {"logits": logits, "loss": loss.reshape(1)}

    return Expected("llama", case, run, (contents(tokens), repr(ignored)), samples=8)


@pytest.mark.explore
@given(
    max_ranks=4,
    max_examples=16,
    case=cases(),
    seq_len=st.integers(2, 11),
    layout=st.sampled_from(sorted(LAYOUTS)),
    ignored=st.lists(st.tuples(st.integers(0, BATCH - 1), st.integers(1, 10)), max_size=8),
    mesh=meshes(),
    scheme=schemes(),
    way=ways(),
    tp_sp=st.booleans(),
)
def test_logits_loss_and_gradients_are_those_of_one_device(
    comm: Any,
    case: Case,
    seq_len: int,
    layout: str,
    ignored: list[tuple[int, int]],
    mesh: int,
    scheme: str | None,
    way: Way,
    tp_sp: bool,
) -> None:
    """Ignored labels make the number of valid tokens differ by rank.

    The first token of each sequence always counts.
    """
    tokens = case.tokens(BATCH, seq_len)
    left_out = [(b, t) for b, t in ignored if t < seq_len - 1]
    wanted = expected(case, tokens, left_out)
    with mesh_of(comm, mesh, **way) as made:
        event(f"{made.axes}{', tp_sp' if tp_sp else ''}")
        model = case.model(made, scheme, tp_sp=tp_sp)
        grid = model.grid
        sharding = LAYOUTS[layout](seq_len, grid.sequence.size)

        def own(x: Tensor) -> Tensor:
            rows = x.tensor_split(grid.replicas.size)[grid.replicas.rank]
            return sharding.shard(rows, grid.sequence.rank, 1)

        counts = torch.ones_like(tokens)
        counts[[b for b, _ in left_out], [t for _, t in left_out]] = 0
        mine = own(tokens).to(grid.everyone.device)
        logits = model(mine, sharding=sharding)
        labels = next_token_labels(mine, comm=grid.sequence, sharding=sharding)
        labels = labels.masked_fill(own(counts).to(labels.device) == 0, IGNORED)
        loss = next_token_loss(logits, labels, tensor=grid.tensor, data=grid.data)
        loss.backward()
        reduce_gradients(model.parameters(), data=grid.data, tensor=grid.tensor)

        first = sum(len(part) for rank in range(grid.tensor.rank) for part in split(model)[rank])
        wanted.check("logits", logits, lambda x: own(x)[..., first : first + logits.shape[-1]])
        wanted.check("loss", loss.reshape(1))
        wanted.check_gradients(model)
        wanted.check_norm(clip_gradient_norm(model.parameters(), 1e-3, tensor=grid.tensor))


def split(model: Llama) -> tuple[tuple[range, ...], ...]:
    """The vocabulary of each tensor rank."""
    return placement_of(model.embed_tokens.weight).held
