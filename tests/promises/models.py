"""List what docstrings of models say under "Communication:", as rows of the ledger."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from promises.alike import MODEL
from promises.ledger import KV, ROWS as ROWS, TOKENS, Book, Scene, row
from torch import Tensor

import sp_core as sp
from sp_core import llama, scheduling
from sp_core.llama import pipeline, train
from sp_core.llama.model import Pass
from sp_core.nn import gradients, loss

CONFIG = replace(MODEL.config, num_hidden_layers=2)
LAYERS, HIDDEN, VOCAB = 2, 8, 12


@row(ROWS, "tp", "Grid.of", "create", "save", "load")
def _(scene: Scene) -> None:
    with scene.sends(agreements=1):
        llama.Grid.of(scene.mesh)
    with scene.sends(agreements=2):
        model = llama.create(CONFIG, scene.mesh)
    held = sum(p.nbytes for p in model.parameters())
    count = len(list(model.parameters()))
    for name, limit, files in (("one", None, 1), ("many", 1, count)):
        gathers = count, (scene.size - 1) * held
        with scene.sends(agreements=3 + files, more=count, all_gather=gathers):
            llama.save(model, scene.folder / name, max_file_bytes=limit)
        with scene.sends(agreements=2):
            llama.load(scene.folder / name, scene.mesh)


@row(ROWS, "tp", "save_training", "load_training")
def _(scene: Scene) -> None:
    """Expect the optimizer's tensors to be gathered as the weights are."""
    model = llama.create(CONFIG, scene.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train.train_step(model, optimizer, [[1] * TOKENS], max_norm=1.0)
    held, count = sum(p.nbytes for p in model.parameters()), len(list(model.parameters()))
    gathers = 2 * count, 2 * (scene.size - 1) * held
    with scene.sends(agreements=3 + 2, more=2 * count, all_gather=gathers):
        train.save_training(model, scene.folder / "step", optimizer=optimizer, step=1)
    with scene.sends(agreements=1):
        train.load_training(model, scene.folder / "step", optimizer=optimizer)


def tokens_of(scene: Scene, length: int = TOKENS) -> Tensor:
    return torch.ones(1, length, dtype=torch.int64)


@row(ROWS, "tp", "Llama.forward")
def _(scene: Scene) -> None:
    model, times = llama.create(CONFIG, scene.mesh), 2 * LAYERS * scene.others + 1
    everywhere = sp.Sharding.contiguous(TOKENS, 1)
    back, nbytes = times * scene.others, times * TOKENS * HIDDEN * 4
    with scene.sends(agreements=1, more=times + back, all_reduce=(times, nbytes)):
        out = model(tokens_of(scene), sharding=everywhere)
    with scene.sends(more=back, all_reduce=(back, nbytes)):
        out.sum().backward()
    model = llama.create(CONFIG, scene.mesh, tp_sp=True)
    scatter, gather = (
        times * scene.of_others(TOKENS * HIDDEN),
        times * scene.to_others(scene.own * HIDDEN),
    )
    sums: Book = {"reduce_scatter": (None, scatter)}
    with scene.sends(agreements=1, more=1, all_gather=(None, gather), **sums):
        out = model(tokens_of(scene), sharding=everywhere)
    with scene.sends(agreements=0, more=4 * LAYERS + 2, all_gather=(None, 2 * gather), **sums):
        out.sum().backward()


@row(ROWS, "tp", "Decoder", "Decoder.prefill", "Decoder.decode", "generate")
def _(scene: Scene) -> None:
    """Let tensor ranks decode and generate."""
    model, times = llama.create(CONFIG, scene.mesh), 2 * LAYERS * scene.others + 1
    with scene.sends(agreements=1):
        decoder = llama.Decoder(model, [9, 9])

    def step(length: int, sequences: int) -> dict[str, tuple[int, int]]:
        sums, logits = (
            (times, times * length * HIDDEN * 4),
            (1, scene.to_others(sequences * VOCAB // scene.size)),
        )
        return {"all_reduce": sums, "all_gather": logits}

    with scene.sends(agreements=1, more=0, **step(5, 2)):
        decoder.prefill([[1, 2, 3], [4, 5]])
    with scene.sends(agreements=1, more=0, **step(1, 1)):
        decoder.decode([[1], []])
    both = zip(step(5, 2).items(), step(2, 2).values(), strict=True)
    total = {op: (calls + 2 * n, nbytes + 2 * more) for (op, (calls, nbytes)), (n, more) in both}
    chosen = 3 * (scene.size - 1) * 2 * 8 if scene.rank == 0 else 0
    with scene.sends(agreements=3 + 3, more=3, **total, broadcast=(3, chosen)):
        llama.generate(model, [[1, 2, 3], [4, 5]], max_tokens=3, stop=())


@row(ROWS, "ring", "Decoder.prefill", "Decoder.decode")
def _(scene: Scene) -> None:
    """Let sequence ranks decode."""
    grid_model = llama.create(CONFIG, scene.mesh, scheme="allgather_kv")
    decoder, more = llama.Decoder(grid_model, [TOKENS + 2]), scene.to_others(4 * 5)
    last = scene.to_others(HIDDEN * (scene.rank == 0))  # rank 0 has the last token of a zigzag
    keys = LAYERS * scene.to_others(scene.own * KV)
    with scene.sends(agreements=1 + LAYERS, all_gather=(None, keys + last)):
        decoder.prefill([[1] * TOKENS])
    with scene.sends(agreements=1, all_gather=(LAYERS * scene.others, LAYERS * more)):
        decoder.decode([[1]])


@row(ROWS, "dp", "generate")
def _(scene: Scene) -> None:
    """Let replicas gather the tokens of each sequence, preceded by their number."""
    model = llama.create(CONFIG, scene.mesh)
    with scene.sends(agreements=3, all_gather=(1, 2 * scene.to_others(1 + 2))):
        llama.generate(model, [[1]] * scene.size, max_tokens=2, stop=())


@row(ROWS, "pp", "forward", "loss_and_gradients", "sum_tied_gradients")
def _(scene: Scene) -> None:
    config = replace(CONFIG, num_hidden_layers=4, tie_word_embeddings=True)
    model, stages = llama.create(config, scene.mesh), scene.comm
    texts = [tokens_of(scene, length) for length in (3, 5, 2)]
    on, back = scene.rank < scene.size - 1, scene.rank > 0
    passes = [Pass(text, range(text.shape[1]), lambda _, q, k, v: q) for text in texts]
    with scene.sends(pipeline=(3 * on, 10 * HIDDEN * 4 * on)) if on else scene.sends():
        pipeline.forward(model, passes)
    batches = [pipeline.MicroBatch(x, x, sp.Sharding.contiguous(x.shape[1], 1)) for x in texts]
    way, mean = on + back, 8 * (scene.size - 1) * (scene.rank == scene.size - 1)
    sent: Book = {"pipeline": (3 * way, 10 * HIDDEN * 4 * way), "broadcast": (1, mean)}
    with scene.sends(agreements=3, more=1, **sent):
        pipeline.loss_and_gradients(model, batches)
    ends = scene.others and scene.rank in (0, scene.size - 1)
    tied: Book = {"tied": (1, VOCAB * HIDDEN * 4)} if ends else {}
    with scene.sends(agreements=int(scene.others), more=0, **tied):
        pipeline.sum_tied_gradients(model)
    assert stages.rank == scene.rank


@row(ROWS, "dp", "loss_and_gradients")
def _(scene: Scene) -> None:
    """Let replicas compare weights that learn and the order, and sum the number of labels."""
    model, x = llama.create(CONFIG, scene.mesh), tokens_of(scene)
    batches = [pipeline.MicroBatch(x, x, sp.Sharding.contiguous(TOKENS, 1))]
    with scene.sends(agreements=2 + 1, more=1, all_reduce=(2, 8 + 4)):
        pipeline.loss_and_gradients(model, batches)


@row(ROWS, "tp", "backward", "train_step", "Llama.loss")
def _(scene: Scene) -> None:
    """Expect a step to send what its parts send and one agreement. A single rank is not tried."""
    model, tensor, text = llama.create(CONFIG, scene.mesh), scene.comm, tokens_of(scene)
    alone, sharding = scene.mesh[()], sp.Sharding.zigzag(TOKENS, 1)
    optimizer: Any = SimpleNamespace(step=lambda: None)
    for clips in (False, True) if scene.others else ():
        tensor.counters.reset()
        labels = loss.next_token_labels(text, comm=alone, sharding=sharding)
        logits = model(text, sharding=sharding)
        loss.next_token_loss(logits, labels, tensor=tensor, data=alone).backward()
        gradients.reduce_gradients(model.parameters(), data=alone, tensor=tensor)
        if clips:
            gradients.clip_gradient_norm(model.parameters(), 1.0, tensor=tensor)
        agreements = tensor.counters["control"].calls + 1
        parts = {op: sent for op, sent in scene.now.items() if op != "control"}
        with scene.sends(agreements, more=0, **parts):
            if clips:
                train.train_step(model, optimizer, [[1] * TOKENS], max_norm=1.0)
            else:
                train.backward(model, [[1] * TOKENS])


@row(ROWS, "tp", "backward", "loss_and_gradients")
def _(scene: Scene) -> None:
    """Expect two more all-reduces in each layer to recompute, and four more with two chunks."""
    model, x = llama.create(CONFIG, scene.mesh), tokens_of(scene)
    batches = [pipeline.MicroBatch(x, x, sp.Sharding.contiguous(TOKENS, 1))]
    check_saving(scene, partial(train.backward, model, [[1] * TOKENS]))
    check_saving(scene, partial(pipeline.loss_and_gradients, model, batches))


def check_saving(scene: Scene, step: Callable[..., object]) -> None:
    """Compare what a step sends that recomputes, offloads or divides, with what it sends else."""
    sent = list[Book]()
    for how in ({}, {"recompute": True}, {"offload": True}, {"chunk": TOKENS // 2}, {"chunk": 99}):
        scene.comm.counters.reset()
        step(**how)
        sent.append({op: n for op, n in scene.now.items() if op != "control" or not scene.checks})
    once, twice, offloaded, chunked, whole = sent
    calls, nbytes = (int(number or 0) for number in once["all_reduce"])
    times, each = LAYERS * scene.others, TOKENS * HIDDEN * 4
    more = (calls + 2 * times, nbytes + 2 * times * each)
    assert whole == once
    assert twice == offloaded == once | {"all_reduce": more}
    # a feed-forward has two forward instead of one, two backward, and two that are repeated
    assert chunked["all_reduce"] == (calls + 4 * times, nbytes + times * each)
    assert {op: n for op, n in chunked.items() if op not in ("all_reduce", "control")} == {
        op: n for op, n in once.items() if op not in ("all_reduce", "control")
    }


@row(ROWS, "tp", "prefill_unequal")
def _(scene: Scene) -> None:
    """Let tensor ranks compute three sequences in two rows, then three that wait."""
    model, times = llama.create(CONFIG, scene.mesh), 2 * LAYERS * scene.others + 1
    plan = scheduling.Assignment((3, 1, 2, 2, 4, 2), (), ((0, 1, 2),), waiting=(3, 4, 5))
    runs, length = 2 + 3, 3 + 1 + 2 + 2 + 4 + 2
    drawn = 4 * 8 * (scene.size - 1) * (scene.rank == 0)
    sums, logits = (
        (runs * times, times * length * HIDDEN * 4),
        (1, scene.to_others(6 * VOCAB // scene.size)),
    )
    sent: Book = {"all_reduce": sums, "all_gather": logits, "broadcast": (4, drawn)}
    more = runs * times + (runs * 2 * LAYERS + 1) * scene.others + 4 + 1
    with scene.sends(agreements=1, more=more, **sent):
        llama.prefill_unequal(model, [[1] * n for n in plan.lengths], plan, pass_tokens=4)


@row(ROWS, "ring", "prefill_unequal")
def _(scene: Scene) -> None:
    """Let sequence ranks gather only the last tokens' logits, and their sequences' numbers."""
    model, size = llama.create(CONFIG, scene.mesh), scene.size
    plan = scheduling.round_robin([2] * (2 * size), size, scheduling.Work(1, 1))
    logits, numbers = scene.to_others(2 * VOCAB), 2 * scene.to_others(2)
    with scene.sends(agreements=3, all_gather=(2, logits + numbers)):
        llama.prefill_unequal(model, [[1, 2]] * (2 * size), plan)
