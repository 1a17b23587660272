"""Go backward over a mesh of CPUs and one of the device, as rank of `mpiexec -n 2`.

Autograd runs the collectives of each device in a thread of its own.
"""

import os
import threading

import torch
from mpi4py import MPI

import sp_core as sp
from device.plugin import NAME, TRANSPORTS

TURNS, LENGTH = 30, 5000


def main() -> None:
    """Compare the gradients of each turn with the exact ones, on every transport of the device."""
    threads, device = set[int](), torch.device(NAME, 0)
    torch.set_num_threads(1)
    for transport in TRANSPORTS:
        with (
            sp.Mesh(MPI.COMM_WORLD, device="cpu", a=2) as one,
            sp.Mesh(MPI.COMM_WORLD, device=device, transport=transport, a=2) as two,
        ):
            for turn in range(TURNS):
                algorithm = ("ring", "mpi", "auto")[turn % 3]
                leaves = [torch.ones(LENGTH, device=where) for where in (one.device, two.device)]
                losses = []
                for x, mesh in zip(leaves, (one, two), strict=True):
                    x.requires_grad_().register_hook(lambda _: threads.add(threading.get_ident()))
                    y = x
                    for _ in range(3):
                        y = sp.all_reduce(y * 2, comm=mesh["a"], algorithm=algorithm)
                    losses.append(y.sum().cpu())
                sum(losses, torch.zeros(())).backward()
                for x in leaves:
                    assert x.grad is not None
                    assert x.grad.unique().tolist() == [64], f"{transport}: wrong gradients"
    assert len(threads) == 2, "autograd has used one thread only"


if __name__ == "__main__":
    main()
    MPI.Finalize()
    os._exit(0)  # at a usual exit the device ends autograd's threads by SIGABRT
