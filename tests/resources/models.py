"""Use models, losses, gradients, schedules of work and formulas once: more rows of `calls`."""

from __future__ import annotations

import argparse
from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch
from llama_cases import Case
from resources.calls import CALLS, Place, row
from torch import nn

import sp_core as sp
from sp_core import cost, llama, planning, scheduling
from sp_core.llama import pipeline, train
from sp_core.nn import gradients, loss

MODEL = Case((4, 2), dtype="float32", ffn=8)
SHALLOW = replace(MODEL, layers=1)


@row
def losses(place: Place, n: int) -> None:
    tensor, data = place.tensor["tp"], place.messages["ring"]
    sharding = sp.Sharding.contiguous(n, data.size)
    tokens = torch.ones(1, n, dtype=torch.int64)
    labels = loss.next_token_labels(tokens, comm=data, sharding=sharding)
    placement = gradients.Placement.replicated((n, 4), 2, partial=True)
    weight = gradients.place(nn.Parameter(torch.ones(n, 4)), placement)
    loss.next_token_loss(weight.unsqueeze(0), labels, tensor=tensor, data=data).backward()
    gradients.reduce_gradients([weight], data=data, tensor=tensor)
    gradients.clip_gradient_norm([weight], 1.0, tensor=tensor)
    placement = gradients.Placement.split((n, 4), 0, 2)
    placement.join(torch.cat([placement.take(torch.ones(n, 4), rank) for rank in range(2)]))
    assert placement.numel == 4 * n > placement.local_shape(0)[0]


def model(mesh: sp.Mesh) -> llama.Llama:
    """Make a small model with random weights, and a layer for each stage."""
    return llama.create((MODEL if "pp" in mesh.axes else SHALLOW).config, mesh, seed=3)


@row
def training(place: Place, n: int) -> None:
    trained = model(place.window if n % 2 else place.tensor)
    optimizer: Any = Namespace(step=lambda: None)  # one of torch imports a million objects
    train.train_step(trained, optimizer, [[1] * n, [2, 3]], max_norm=1.0)
    train.backward(trained, [[1] * n, [2, 3]])


@row
def stages(place: Place, n: int) -> None:
    trained = model(place.stages)
    tokens, sharding = torch.ones(1, n, dtype=torch.int64), sp.Sharding.contiguous(n, 1)
    batches = [pipeline.MicroBatch(tokens, tokens, sharding)] * 2
    pipeline.loss_and_gradients(trained, batches)
    pipeline.sum_tied_gradients(trained)


@row
def generating(place: Place, n: int) -> None:
    whole = model((place.window, place.tensor, place.stages)[n % 3])
    sampling = llama.Sampling(temperature=1.0, seed=n)
    llama.generate(whole, [[1] * (n % 8 + 1), [2]], max_tokens=2, sampling=sampling)


@row
def unequal_sequences(place: Place, n: int) -> None:
    lengths = [n, 2, 3, 1]
    policy = scheduling.POLICIES["dynamic" if n % 2 else "balanced"]
    plan = policy(lengths, 2, scheduling.Work(1, 1))
    texts = [[1] * length for length in lengths]
    llama.prefill_unequal(model(place.window), texts, plan, pass_tokens=4)


@row
def model_folders(place: Place, n: int) -> None:
    folder = place.folder / f"{type(place.comm).__name__} {n}"
    llama.save(model(place.tensor), folder, tokenizer=llama.byte_tokenizer(), max_file_bytes=999)
    llama.load(folder, place.tensor)


@row
def schedules_of_work(place: Place, n: int) -> None:
    work = scheduling.Work(1, 1)
    for policy in scheduling.POLICIES.values():
        plan = policy([n, 1, 2], 2, work)
        assert sum(plan.loads(work)) >= plan.useful(work)
    scheduling.split_stages([1.0] * n, 2)
    makers = (scheduling.gpipe, scheduling.one_forward_one_backward, scheduling.prefill_only)
    orders = [make(2, n % 5 + 1) for make in makers]
    for order in orders:
        shown = scheduling.timeline(order)
        scheduling.picture(shown)
        assert 0 <= shown.bubble == 1 - sum(shown.busy) / (2 * shown.end)
    assert 0 < scheduling.bubble_share(2, n) < 1


@row
def projections(place: Place, n: int) -> None:
    sharding = sp.Sharding.contiguous(4 * n, 2)
    problem = cost.Attention(sharding, sharding, sp.Mask(), 1, 4, 2, 4, 4)
    for formula in (cost.allgather_kv, cost.ring, cost.ulysses):
        formula(problem, 0)
    cost.hybrid(problem, 0, 0, [[0, 1]]), cost.tp_sp(sharding, 0, 1, 4, 4)
    planning.add_arguments(argparse.ArgumentParser().add_subparsers())
    options = {
        "seq": 8 * n,
        "ranks": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "batch": 1,
        "show": 3,
    }
    links = {"link": "1gbit,1us", "node_link": "1gb,1us", "ranks_per_node": 1}
    flops = planning.timed_flops(4, 8, 1)
    planning.main(Namespace(**options, **links, dtype="float32", flops=flops), None)


EVERY_CALL = CALLS
"""The rows of `calls`, and those of this file."""
