"""Test process groups, DeviceMesh and FSDP2, which need processes of torchrun.

Each plain test here runs on all ranks at once; `test_torchrun.py` starts them with `kit.torchrun`.
"""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.carriers import CARRIERS
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sp_core as sp
from sp_core.nn.gradients import reduce_gradients

FSDP = Path(__file__).parents[2] / "examples" / "fsdp.py"


def members(group: sp.Communicator) -> list[int]:
    """Return the ranks of a communicator as torch numbers them."""
    mine = torch.tensor([distributed.get_rank()])
    return sp.all_gather(mine, comm=group, algorithm="ring").tolist()


def test_a_mesh_takes_every_kind_of_group() -> None:
    size = distributed.get_world_size()
    backwards = DeviceMesh("cpu", torch.arange(size).flip(0), mesh_dim_names=("sp",))
    for given in (None, distributed.group.WORLD, backwards, DeviceMesh("cpu", torch.arange(size))):
        with sp.Mesh(given, sp=size) as mesh:
            in_order = list(range(size))
            assert members(mesh["sp"]) == (in_order[::-1] if given is backwards else in_order)
            assert mesh[()].size == 1


def test_only_the_ranks_of_a_group_make_its_mesh() -> None:
    first, rest = [0], list(range(1, distributed.get_world_size()))
    groups = [distributed.new_group(ranks) for ranks in (first, rest)]
    for ranks, group in zip((first, rest), groups, strict=True):
        if distributed.get_rank() in ranks:
            for turn in (1, 2):  # these meshes differ from the world's and from each other
                with sp.Mesh(group, a=len(ranks), b=1) as mesh:
                    assert members(mesh["a", "b"]) == ranks, turn
                    with pytest.raises(sp.RankError, match=f"just the {len(ranks)} ranks"):
                        mesh.to_device_mesh()
        else:
            with pytest.raises(TypeError, match="ProcessGroup, a DeviceMesh, or None"):
                sp.Mesh(group, a=len(ranks))
    alone = DeviceMesh("cpu", torch.tensor([0]))
    if distributed.get_rank():
        with pytest.raises(sp.RankError, match="is not one of the ranks"):
            sp.Mesh(alone, a=1)


def test_the_axes_are_those_of_a_device_mesh_and_go_back_to_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = distributed.get_world_size()
    grid = DeviceMesh("cpu", torch.arange(size).flip(0)[None], mesh_dim_names=("dp", "sp"))
    with sp.Mesh(grid) as mesh:
        assert mesh.axes == {"dp": 1, "sp": size}
        again = mesh.to_device_mesh()
        assert (again.mesh_dim_names, tuple(again.shape)) == (("dp", "sp"), (1, size))
        assert torch.equal(again.mesh, grid.mesh)
        monkeypatch.setattr(distributed, "is_initialized", lambda: distributed.get_rank() == 0)
        with pytest.raises(sp.RankError, match="Call init_process_group"):
            mesh.to_device_mesh()
        monkeypatch.undo()
        monkeypatch.setattr(mesh, "device", torch.device("cuda", distributed.get_rank()))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        with pytest.raises(sp.DeviceError, match="set_device"):
            mesh.to_device_mesh()
        monkeypatch.undo()
    with pytest.raises(sp.RankError, match="mesh has been freed"):
        mesh.to_device_mesh()
    with pytest.raises(sp.ShapeError, match=f"has {size + 1} ranks"):
        sp.Mesh(grid, sp=size + 1)


def test_objects_of_any_length_come_from_the_root() -> None:
    size = distributed.get_world_size()
    with sp.Mesh(None, sp=size) as mesh:
        for root in range(size):
            comm = mesh["sp"]._control.comm
            assert comm.bcast("x" * comm.rank, root) == "x" * root


@pytest.mark.parametrize("transport", ["host", "window", "distributed"])
def test_memory_and_numbers_are_shared_without_mpi(transport: str) -> None:
    with sp.Mesh(None, transport=transport, sp=distributed.get_world_size()) as mesh:
        group = mesh["sp"]
        assert (group.window is not None) == (transport == "window")
        made = sp.plan("all_reduce", torch.ones(4), comm=group)
        assert made.algorithm == ("window" if transport == "window" else "mpi")  # "mpi" is gloo
        store, keys = distributed.distributed_c10d._get_default_store(), set[int]()
        for _ in range(3):
            counter = group.counter()
            drawn = [counter.take() for _ in range(5)]
            counter.free()
            everyone = sp.all_gather(torch.tensor(drawn), comm=group).tolist()
            assert sorted(everyone) == list(range(5 * group.size))
            keys.add(store.num_keys())
        assert len(keys) == 1
        x = sp.shared_empty((3,), comm=group).fill_(group.rank)
        sp.fence(comm=group)
        if transport == "window":
            assert sp.peer(x, group.size - 1, comm=group).tolist() == [group.size - 1] * 3
        sp.fence(comm=group)


@pytest.mark.parametrize("way", ["staged", "pipelined"])
def test_tensors_of_a_device_go_over_gloo(way: str) -> None:
    """They are copied into host memory, from where gloo sends collectives and messages."""
    size = distributed.get_world_size()
    with sp.Mesh(None, sp=size) as mesh:
        group = mesh["sp"]
        group.transport = CARRIERS[way](group)
        x, whole = torch.arange(5) + group.rank, torch.arange(5) + torch.arange(size)[:, None]
        for algorithm in ("mpi", "ring"):
            named: Any = {"comm": group, "algorithm": algorithm}
            begun = sp.all_gather_start(x, **named), sp.all_reduce_start(x, **named)
            assert torch.equal(begun[1].wait(), whole.sum(0))
            assert torch.equal(begun[0].wait(), whole.view(-1))
            assert torch.equal(sp.all_gather(x, **named), whole.view(-1))


def program() -> Any:
    """Return the names that the example defines, as attributes."""
    return SimpleNamespace(**runpy.run_path(str(FSDP)))


class Blocks(nn.Module):
    """A layer of torch before one that sums its gradients over the ranks of a sequence."""

    def __init__(self, comm: sp.Communicator, sharding: sp.Sharding) -> None:
        super().__init__()
        self.sharding = sharding
        self.embedding = nn.Embedding(8, 4)
        self.block = sp.TransformerBlock(4, 2, comm=comm)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map this rank's tokens (B, S/P) to outputs (B, S/P, 4)."""
        out: torch.Tensor = self.block(self.embedding(tokens), sharding=self.sharding)
        return out


def backward_under_ddp(model: Blocks, tokens: torch.Tensor, mesh: sp.Mesh) -> list[Any]:
    """Return the gradients, by the recipe of the how-to page."""
    replica = DistributedDataParallel(model, device_mesh=mesh.to_device_mesh()["dp"])
    (replica(tokens).square().sum() * mesh["dp"].size).backward()
    reduce_gradients(replica.module.embedding.parameters(), data=mesh["ring"])
    return [weight.grad for weight in model.parameters()]


def backward_under_fsdp(model: Blocks, tokens: torch.Tensor, mesh: sp.Mesh) -> list[Any]:
    """Return the gradients, by the recipe of the how-to page."""
    fully_shard(model, mesh=mesh.to_device_mesh()["dp"])
    (model(tokens).square().sum() * mesh["dp"].size).backward()
    shards: list[Any] = [weight.grad for weight in model.parameters()]
    own = shards[0].to_local()
    own.copy_(sp.all_reduce(own, comm=mesh["ring"]))
    return [shard.full_tensor() for shard in shards]


def backward_of_the_example(model: Any, tokens: torch.Tensor, mesh: sp.Mesh) -> list[Any]:
    """Return the gradients, by the recipe of the example: FSDP over replicas and ring."""
    fully_shard(model, mesh=mesh.to_device_mesh())
    (model(tokens).square().sum() * distributed.get_world_size()).backward()
    return [weight.grad.full_tensor() for weight in model.parameters()]


@pytest.mark.parametrize(
    "backward", [backward_under_ddp, backward_under_fsdp, backward_of_the_example]
)
def test_gradients_of_layers_under_data_parallelism_are_those_of_one_process(backward: Any) -> None:
    """DDP or FSDP sums over replicas, a block or FSDP over the ring, and the program the rest."""
    size, tokens = distributed.get_world_size(), torch.arange(48).square().remainder(8).view(2, 24)
    kind = program().Model if backward is backward_of_the_example else Blocks
    dp = 2 - size % 2
    with sp.Mesh(None, dp=dp, ring=size // dp) as mesh:
        found = []
        for ring, rows in ((mesh[()], tokens), (mesh["ring"], tokens[mesh["dp"].rank :: dp])):
            sharding = sp.Sharding.zigzag(seq_len=24, size=ring.size)
            torch.manual_seed(2)  # the same weights on every rank
            model = kind(ring, sharding).double()
            mine = sharding.shard(rows, ring.rank, 1)
            if ring is mesh["ring"]:
                found.append(backward(model, mine, mesh))
            else:
                model(mine).square().sum().backward()
                found.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(*found)


def test_the_example_learns() -> None:
    losses = program().main(steps=4)
    assert losses[0] > losses[1] > losses[-1] > 0
