"""Define `Mesh`: named axes over ranks of an MPI communicator or a torch.distributed group."""

import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from sp_core import agreement, arguments, failing, progress
from sp_core.communicator import Check, Communicator, Reordered
from sp_core.errors import DeviceError, NotCopied, RankError, ShapeError
from sp_core.machine import cpu_model, node_cores, node_name, node_number
from sp_core.observer import observer_of
from sp_core.programs import defaults
from sp_core.transport import (
    MAY_BE_REFUSED,
    NAMES,
    HostWrapper,
    Intracomm,
    Transfer,
    choose,
    named_device,
    wait,
)
from sp_core.tuning import Tuning, find

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Mesh(NotCopied):
    """Arrange the ranks of a communicator as a grid with named axes; the last axis varies fastest.

    Use it as a context manager, which frees the communicators that it makes, but not `comm`. If an
    exception leaves the block on one rank, the others raise `PeerFailed`. They do so in waits for
    messages or shared memory, and in calls that check arguments between ranks. A forked process may
    leave the block without effect. A generator closed in it frees nothing: make the mesh outside.

    Args:
        comm: an mpi4py communicator, a ProcessGroup of torch.distributed, None for all ranks of its
            default group, or a DeviceMesh, whose dimensions are the axes if none are given. Ranks
            of a ProcessGroup or DeviceMesh need no mpi4py: they communicate over gloo, and with
            "distributed" on a GPU over NCCL.
        device: where tensors live, also the number of an accelerator; default "cpu". "cuda" without
            a number is the current device if that is not cuda:0, else the rank's number on its node
            modulo the number of devices. Make tensors on `mesh.device`.
        transport: "auto", a name of `sp_core.transport.NAMES`, or a `HostWrapper`. With "window"
            (host memory), "ipc" (memory of a GPU) and "pinned" (host memory that a GPU reads) the
            ranks of one machine share memory, or send messages if they cannot
            (`Communicator.no_window` says why). "auto" takes the transport that SP_TRANSPORT in the
            environment names, unless that is one for other kinds of devices only; else the first of
            `NAMES[device type]`. An unknown name in SP_TRANSPORT is a DeviceError.
        check: "agree": every collective first checks that the ranks agree on its arguments. "off":
            collectives compare nothing between ranks, and a rank's wrong arguments raise an error
            on that rank alone, unless ranks must tell each other lengths. Schemes, layers, losses,
            gradients and models still check. Docstrings count the agreements with "off"; with
            "agree" each collective inside a call, or in its backward, may make one more.
        algorithm: the algorithm of each collective whose call says "auto": a name, for all
            collectives that have it, or names by collective, as a mapping or as text,
            "all_reduce=ring,all_gather=bruck"; `sp_core.programs.ALGORITHMS` lists them. Default:
            the environment's SP_ALGORITHM, else "auto".
        nodes: the node of each rank of `comm`, any numbers. Only algorithms use it. Default: the
            environment's SP_NODES, such as "0,0,1,1"; else nodes differ by host name and boot id.
        tuning: measured constants by which "auto" takes the quickest algorithm on a CPU: a file,
            "auto" for that of `sp-core doctor --measure` for this machine, or "off" for none. Rank
            0's constants hold for all. Default: the environment's SP_TUNING, else "auto".
        axes: the size of each axis, such as dp=2, ring=4; their product is the size of `comm`.
            `mesh["ring"]` is the communicator of an axis, `mesh["dp", "ring"]` that of two.

    Communication:
        Every rank of `comm` makes the mesh: one agreement on the arguments, one `MPI_Comm_dup`, and
        one broadcast of rank 0's constants, if any. For each set of axes, one `MPI_Comm_split`, one
        `MPI_Comm_dup`, and the communication that makes the transport; with "device" and
        "distributed" also one agreement.

    Raises:
        ShapeError: no axis, or sizes whose product is not the size of `comm`.
        DeviceError: there is no such device, no such transport, or the ranks cannot use it.
        ValueError: an unknown collective or algorithm; nodes that are not one number per rank;
            constants that cannot be read.
        TypeError: an argument of a wrong type.
        CollectiveMismatch: ranks that ask for different meshes.
        PeerFailed: ranks of torch.distributed cannot connect over gloo.
        RankError: this rank is not in the given group.

    Errors are raised on every rank, except the RankError, and the TypeError of a wrong `comm`.
    """

    def __init__(
        self,
        comm: "Intracomm | ProcessGroup | DeviceMesh | None",
        *,
        device: torch.device | str | int | None = None,
        transport: str | HostWrapper = "auto",
        check: Check = "agree",
        algorithm: str | Mapping[str, str] | None = None,
        nodes: Sequence[int] | None = None,
        tuning: Tuning | str | Path | None = None,
        **axes: int,
    ) -> None:
        comm, axes = _ranks_of(comm, axes)
        self.axes, self.rank, self.size = axes, int(comm.rank), int(comm.size)
        named = os.environ.get("SP_ALGORITHM") or "auto"
        self._algorithm = named if algorithm is None else algorithm
        self._made: dict[tuple[str, ...], Communicator] = {}
        self._check, self._freed, self._pid = check, False, os.getpid()
        constants = error = None
        call = ""  # the text stays empty if a check fails: then it is not compared
        try:
            self._check_arguments()
            self.device = named_device(device, getattr(comm, "world_rank", self.rank))
            self._transport = named_transport(transport, self.device)
            nodes = read_nodes(nodes, self.size)
            constants = _constants(tuning, comm)
            call = f"Mesh(axes={self.axes}, device={self.device.type}, {check=}, {nodes=}, "
            call += f"transport={self._transport!r}, algorithm={self._algorithm})"
        except Exception as found:  # noqa: BLE001  # the other ranks must not wait for this one
            error = found
        told = agreement.agree(comm, call, 2 * node_number() + (constants is not None), error)
        self._nodes = nodes or [number // 2 for number in told]
        self.tuning: Tuning | None = comm.bcast(constants) if told[0] % 2 else None
        self._comm, self._progress = comm.Dup(), progress.of_this_rank()
        try:
            for names in chain(*(combinations(self.axes, n + 1) for n in range(len(self.axes)))):
                self._add(names)
        except DeviceError:  # on every rank: the transport cannot be used here
            self.free()
            raise

    def __getitem__(self, axes: str | tuple[str, ...]) -> Communicator:
        """Return the communicator along one axis, or along several; the last one varies fastest.

        No axis means this rank alone. Nothing is sent. Communicators along axes in the mesh's order
        are there from the beginning. A communicator along axes in a different order is made when
        all its ranks first use it, in the same call.

        Raises:
            ShapeError: an unknown axis, or one named twice.
            RankError: the mesh has been freed.
        """
        if self._freed:
            raise RankError("this mesh has been freed. Use it inside its `with Mesh(...)` block.")
        is_one, known = isinstance(axes, str) or not isinstance(axes, Iterable), tuple(self.axes)
        names: tuple[Any, ...] = (axes,) if is_one else tuple(axes)
        if not all(name in known and names.count(name) == 1 for name in names):
            raise ShapeError(
                f"axes {names} were asked for; this mesh has {known}. Pass its names, each once."
            )
        if names not in self._made:
            self._made[names] = self._later(names)
        return self._made[names]

    def to_device_mesh(self) -> DeviceMesh:
        """Return torch's DeviceMesh with the same axes, such as for `fully_shard`.

        Every rank of the default process group calls this, because torch makes a process group for
        each axis.

        Raises:
            RankError: torch.distributed has not started, or has other ranks; or the mesh is freed.
            DeviceError: a rank's current device is not `mesh.device`. Both on every rank.
        """

        def own() -> int:
            mine = self.device.index
            if mine is not None and mine != (now := torch.accelerator.current_device_index()):
                raise DeviceError(
                    f"the mesh is on {self.device}; torch would use its current device, number "
                    f"{now}. Call torch.cuda.set_device(mesh.device) on every rank first."
                )
            if distributed.is_initialized() and distributed.get_world_size() == self.size:
                return distributed.get_rank()
            raise RankError(
                f"a DeviceMesh needs torch.distributed with just the {self.size} ranks of the mesh."
                " Call init_process_group() on them, or pass Mesh a DeviceMesh of all ranks."
            )

        ranks = self[tuple(self.axes)].agree_on(lambda: "to_device_mesh()", own)
        grid = torch.tensor(ranks, device="cpu").view(tuple(self.axes.values()))
        return DeviceMesh(self.device.type, grid, mesh_dim_names=tuple(self.axes))

    def free(self) -> None:
        """Free every communicator of the mesh, after one agreement for each.

        All ranks free their meshes in the same order. A second call does nothing.

        Raises:
            RankError: a rank leaves, or makes a different call.
        """
        if self._freed:
            return
        # the communicator of all ranks last: there they learn that one has stopped
        order = sorted(self._made, key=lambda names: (len(names), names))
        try:
            asked = (self._made[names].ask_to_free(" with its mesh") for names in order)
            wait(Transfer([one.is_answered for one in chain(*asked)]), self._progress.poll)
            for names in order:
                self._made[names].free(is_agreed=True)
        except RankError as error:
            self._abandon(error)
            raise
        self._freed = True
        self._comm.Free()

    def _abandon(self, error: BaseException) -> None:
        """Stop using every communicator because of an error, without waiting for other ranks."""
        for communicator in self._made.values():
            communicator.abandon(error)
        self._freed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if os.getpid() != self._pid:  # a process that this rank has forked is no rank
            return
        if error is None:
            self.free()
        else:
            failing.left_by(error)
            self._abandon(error)

    def _add(self, names: tuple[str, ...]) -> None:
        """Make the communicator along some axes.

        If the transport cannot be used on some ranks, raise a DeviceError on all ranks.
        """
        error, ranks = None, self._members(names)
        try:
            split = self._comm.Split(ranks[0], ranks.index(self.rank))
            self._made[names] = self._make(names, cast("Intracomm", split))
        except DeviceError as found:
            error = found
        if self._transport in MAY_BE_REFUSED:
            agreement.agree(self._comm, f"mesh[{names}]", error=error)

    def _make(self, names: tuple[str, ...], comm: Intracomm) -> Communicator:
        return Communicator(
            comm,
            device=self.device,
            transport=self._transport,
            check=self._check,
            name=_title(names),
            algorithm=self._algorithm,
            nodes=self._nodes_of(self._members(names)),
            tuning=self.tuning,
        )

    def _later(self, names: tuple[str, ...]) -> Communicator:
        """Make a communicator of this rank alone (no names), or a `Reordered` (another order)."""
        if not names:
            own = observer_of(self._comm).alone()  # that of a checked communicator is checked
            if own is None:
                from mpi4py import MPI

                own = MPI.COMM_SELF.Dup()
            return self._make(names, cast("Intracomm", own))
        usual = tuple(axis for axis in self.axes if axis in names)  # in the order of the mesh
        ranks, mine = self._members(usual), self._members(names)
        order = list(map(ranks.index, mine))
        made = Reordered(self._made[usual], order, _title(names), self._nodes_of(mine))
        made.check = self._check  # the check of the usual product may be off for now
        return made

    def _members(self, names: tuple[str, ...]) -> list[int]:
        """Return the ranks of this rank's group along some axes; the last one varies fastest."""
        others = [axis for axis in self.axes if axis not in names]
        places = [list(self.axes).index(axis) for axis in (*others, *names)]
        grid = np.arange(self.size).reshape(tuple(self.axes.values())).transpose(places)
        count = math.prod(self.axes[axis] for axis in names)
        return next(ranks for ranks in grid.reshape(-1, count).tolist() if self.rank in ranks)

    def _nodes_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the node of each of some ranks, numbered from 0 in order of first appearance."""
        order = list(dict.fromkeys(self._nodes[rank] for rank in ranks))
        return tuple(order.index(self._nodes[rank]) for rank in ranks)

    def _check_arguments(self) -> None:
        arguments.check("size", **self.axes)
        self.axes = {axis: int(length) for axis, length in self.axes.items()}
        chosen = defaults(self._algorithm).items()  # in the same order on every rank
        self._algorithm = {op: name for op, name in chosen if name != "auto"}
        ranks = math.prod(self.axes.values())
        if min(self.axes.values(), default=0) < 1 or ranks != self.size:
            sizes = " x ".join(f"{axis}={length}" for axis, length in self.axes.items())
            start = f" Start the program with: sp-core run -n {ranks} -- python ..."
            raise ShapeError(
                f"the mesh {sizes} has {ranks} ranks, the communicator has {self.size}. Choose "
                f"sizes >= 1 whose product is {self.size}.{start * (self.size == 1 < ranks)}"
                if sizes
                else f"no axis was given; pass at least one, such as Mesh(comm, tp={self.size})."
            )
        if self._check not in ("agree", "off"):
            raise ValueError(f"check={self._check!r} was given; pass 'agree' or 'off'.")


def _ranks_of(given: Any, axes: dict[str, int]) -> tuple[Intracomm, dict[str, int]]:
    """Return a communicator with mpi4py's methods, and `axes`, or if empty those of a DeviceMesh.

    From now on an uncaught error of this rank's program ends all ranks (`failing.watch_over`).

    Raises:
        TypeError: `given` is no communicator; on this rank alone.
    """
    if hasattr(given, "Split"):
        arguments.check(comm=given)
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi and isinstance(given, mpi.Comm):
            world = max(mpi.COMM_WORLD, given, key=lambda comm: comm.size)  # MPI may spawn ranks
            # a communicator that the user has freed since then is false
            failing.watch_over(world.rank, world.size, lambda x: (world or mpi.COMM_WORLD).Abort(x))
        return given, axes
    from sp_core.transport import groups

    comm = groups.communicator_of(given)
    arguments.check(comm=comm or given)
    failing.watch_over(distributed.get_rank(), distributed.get_world_size(), failing.leave)
    if not axes and (names := getattr(given, "mesh_dim_names", None)):
        axes = dict(zip(names, given.shape, strict=True))
    return cast("Intracomm", comm), axes


def _title(names: tuple[str, ...]) -> str:
    """Return the name of the communicator along some axes, for error messages."""
    return "mesh[" + ", ".join(map(repr, names)) + "]"


def read_nodes(nodes: Iterable[object] | None, size: int | None = None) -> list[int]:
    """Read the node of each rank from an argument, or from the environment's SP_NODES.

    Args:
        nodes: whole numbers, also as text; None for the environment.
        size: how many numbers there must be, if that is known.

    Returns:
        A number for each rank; [] if neither the argument nor SP_NODES is given.

    Raises:
        ValueError: the given values are not one whole number per rank.
    """
    given = os.environ.get("SP_NODES")
    if nodes is None and not given:
        return []
    nodes = str(given).split(",") if nodes is None else nodes
    # an array without dims has the method, but cannot be iterated over
    several = hasattr(nodes, "__iter__") and getattr(nodes, "ndim", True)
    texts = list(map(str, nodes)) if several else [repr(nodes)]
    if size not in (None, len(texts)) or not all(re.fullmatch(r"\s*-?\d+\s*", x) for x in texts):
        raise ValueError(
            f"nodes {texts} were given{f' for {size} ranks' if size else ''}. Pass nodes=, or "
            "SP_NODES, with one whole number per rank."
        )
    return list(map(int, texts))


def named_transport(transport: str | HostWrapper, device: torch.device) -> str | HostWrapper:
    """Return `transport`, or for "auto" SP_TRANSPORT, unless that is for another kind of device.

    Raises:
        DeviceError: there is no such transport for this kind of device.
    """
    named = os.environ.get("SP_TRANSPORT") or "auto"
    kinds = [kind for kind, names in NAMES.items() if named in names]
    if transport == "auto" and (device.type in kinds or not kinds):
        transport = named
    choose(transport, device)
    return transport


def fingerprint(comm: Intracomm | None = None) -> dict[str, str]:
    """Return texts that describe this machine and its MPI library: host, processor, cores and mpi.

    Constants of another fingerprint are not used. A `comm` of torch.distributed uses no MPI.
    """
    mpi = None if hasattr(comm, "world_rank") else sys.modules.get("mpi4py.MPI")  # starts no MPI
    vendor, version = mpi.get_vendor() if mpi else ("none", ())
    return {
        "host": node_name(),
        "processor": cpu_model(),
        "cores": str(node_cores()),
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
    }


def _constants(tuning: Tuning | str | Path | None, comm: Intracomm) -> Tuning | None:
    """Return on rank 0 the measured constants that were asked for, if any; on other ranks None."""
    if not (tuning is None or isinstance(tuning, Tuning | str | Path)):
        raise TypeError(f"tuning={tuning!r} was given; pass a Tuning, a path, 'auto' or 'off'.")
    if comm.rank:
        return None
    return tuning if isinstance(tuning, Tuning) else find(lambda: fingerprint(comm), tuning)
