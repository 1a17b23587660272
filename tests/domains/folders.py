"""Declare the domain of model folders: models that are created, saved, read and loaded."""

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from llama_cases import Case
from oracle.once import once
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import sp_core as sp
from domains import models
from domains.declared import Call, Parts, Subject, Values, spans, values
from domains.models import (
    ARCHITECTURE,
    DTYPES,
    FEW_CALLS,
    ONE_CALL,
    SCHEMES,
    SMALL,
    architecture,
    case_of,
    meshes,
)
from domains.situations import on_mesh
from sp_core.llama import Checkpoint, Grid, Llama, LlamaConfig, byte_tokenizer, create, load, save
from sp_core.llama.names import checkpoint_name
from sp_core.nn.gradients import Placement, placement_of
from sp_core.schemes import SCHEMES as SCHEMES_BY_NAME
from sp_core.testing import run_threads

AXES = (
    "ring, ulysses",
    "tp",
    "pp",
    "dp",
    "ring, tp",
    "pp, tp",
    "dp, pp",
    "pp, ring, tp",
    "tp, ulysses, pp",
)

MADE: dict[str, Parts] = {
    "dtype": values(*(getattr(torch, name) for name in DTYPES)),
    "scheme": values(*SCHEMES),
    "tp_sp": values(False, True),
}


WEIGHTS = "model.safetensors"


def check_parts(model: Llama, whole: dict[str, Tensor]) -> None:
    """Compare every parameter of this rank with its part of a whole tensor, bit for bit."""
    held = dict(model.named_parameters())
    for name, parameter in held.items():
        part = placement_of(parameter).take(whole[checkpoint_name(name)], model.grid.tensor.rank)
        assert torch.equal(parameter, part.to(parameter)), name
    layers = {int(name.split(".")[1]) for name in held if name.startswith("layers.")}
    assert layers == set(model.own_layers)
    assert ("embed_tokens.weight" in held) == (
        model.is_first or (model.is_last and model.config.tie_word_embeddings)
    )
    assert ("norm.weight" in held) == model.is_last


def created(mesh: sp.Mesh, drawn: Values) -> Call:
    """Return the call that creates a model with random weights."""
    given = {name: drawn[name] for name in ("seed", *MADE)} | {
        "config": case_of(drawn).config,
        "mesh": mesh,
    }
    return Call(create, given, partial(judge_created, given))


def judge_created(given: Values, model: Llama) -> None:
    """Compare the weights with those that one rank creates, and check how those were drawn.

    Their standard deviation is 0.02 and no number occurs twice. The weights of norms are 1.
    """
    assert all(getattr(model, name) == given[name] for name in ("config", "dtype", "tp_sp"))
    key = ("create", repr(given["config"]), given["seed"])
    whole = once(key, lambda: run_threads(1, partial(alone, given["config"], given["seed"]))[0])
    check_parts(model, whole)
    drawn = {name: x for name, x in whole.items() if x.dim() > 1}
    assert all((x == 1).all() for name, x in whole.items() if name not in drawn)
    line = torch.cat([x.flatten() for x in drawn.values()])
    assert abs(float(line.std()) / 0.02 - 1) < 5 / math.sqrt(2 * len(line))
    assert len(line.unique()) == len(line), "a number was drawn twice"
    seed = given["seed"] + 1
    other = once((*key, seed), lambda: run_threads(1, partial(alone, given["config"], seed))[0])
    assert not any(torch.equal(x, other[name]) for name, x in drawn.items()), "not of the seed"


def alone(config: LlamaConfig, seed: int, comm: Any) -> dict[str, Tensor]:
    """Return the weights of a model that one rank creates."""
    with sp.Mesh(comm, tp=1) as mesh:
        model = create(config, mesh, seed=seed, dtype=torch.float64)
        return {checkpoint_name(name): weight.detach() for name, weight in model.named_parameters()}


def written(case: Case, folder: Path, drawn: Values) -> dict[str, Tensor]:
    """Write a folder as other programs write it, and return its tensors."""
    tensors = {
        name: x.to(getattr(torch, case.dtype)).contiguous()
        for name, x in case.kept_weights().items()
    }
    if drawn["folder.dtypes"] == "two":
        other = torch.float32 if case.dtype == "float64" else torch.float64
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(other)
    if drawn["folder.more"] == "angles and a tied head":
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
        tensors |= (
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()} if case.tied else {}
        )
    (folder / "config.json").write_text(json.dumps(case.config.to_dict()))
    count = {"one": 1, "two": 2, "one a tensor": len(tensors)}[drawn["folder.files"]]
    names = [f"part-{number}.safetensors" for number in range(count)] if count > 1 else [WEIGHTS]
    places = {name: names[number % count] for number, name in enumerate(tensors)}
    for file in names:
        save_file({name: x for name, x in tensors.items() if places[name] == file}, folder / file)
    if count > 1:
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": places}))
    return tensors


FOLDER: dict[str, Parts] = {
    "folder.files": values("one", "two", "one a tensor"),
    "folder.dtype": values(*DTYPES),
    "folder.dtypes": values("one", "two"),
    "folder.more": values("nothing", "angles and a tied head"),
    "folder.type": {"Path": lambda c, v: Path, "str": lambda c, v: str},
}


def loaded(mesh: sp.Mesh, drawn: Values) -> Call:
    """Return the call with which all ranks load a folder that one rank writes."""
    case, comm, folder = case_of(drawn), mesh._comm, drawn["(folder)"]
    tensors = comm.bcast(written(case, folder, drawn) if comm.rank == 0 else None, root=0)
    given = {name: drawn[name] for name in MADE} | {
        "folder": drawn["folder.type"](folder),
        "mesh": mesh,
    }

    def judge(model: Llama) -> None:
        assert model.config == case.config
        assert model.dtype == (given["dtype"] or getattr(torch, case.dtype))
        check_parts(model, {name: x.to(model.dtype) for name, x in tensors.items()})

    return Call(load, given, judge)


@contextmanager
def read(_: Any, drawn: Values) -> Iterator[Call]:
    """Yield the call that reads a part of one tensor of a folder."""
    case, chance = case_of(drawn), Random(drawn["seed"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = written(case, folder, drawn)
        checkpoint = Checkpoint(drawn["folder.type"](folder))
        (folder / "other").mkdir()
        written(replace(case, layers=case.layers + 1), folder / "other", drawn)
        shape, kind = tensors[drawn["name"]].shape, drawn["placement"]
        ends = {"pieces of columns": len(shape) - 1, "pieces of rows, from the end": -len(shape)}
        dim, size = ends.get(kind, 0), drawn["rank"] + 1
        cuts = sorted(chance.randint(0, shape[dim]) for _ in range(8))
        pieces = tuple(
            (range(a, b), range(c, d)) for a, b, c, d in zip(*[iter(cuts)] * 4, strict=True)
        )
        placements = {
            "replicated": Placement.replicated(shape, size),
            "split": Placement.split(shape, 0, size),
        }
        given = {
            "name": drawn["name"],
            "placement": placements.get(kind) or Placement(shape, dim, pieces * size),
            "rank": drawn["rank"],
        }
        yield Call(checkpoint.read, given, partial(judge_read, checkpoint, tensors, given))


def judge_read(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], given: Values, part: Tensor
) -> None:
    """Compare the part, and the checkpoint's names, shapes, dtypes and fingerprint."""
    assert torch.equal(part, given["placement"].take(tensors[given["name"]], given["rank"]))
    assert sorted(checkpoint.names) == sorted(tensors)
    assert {name: (checkpoint.shape(name), checkpoint.dtype(name)) for name in tensors} == {
        name: (tuple(x.shape), x.dtype) for name, x in tensors.items()
    }
    again, other = (
        Checkpoint(folder).fingerprint()
        for folder in (checkpoint.folder, checkpoint.folder / "other")
    )
    assert again == checkpoint.fingerprint() != other


def saved(mesh: sp.Mesh, drawn: Values) -> Call:
    """Return the call with which all ranks save a model together."""
    case, folder = case_of(drawn), drawn["(folder)"]
    target = folder / "a" / "b" / "c" if "below" in drawn["folder"] else folder / "model"
    if mesh.rank == 0 and drawn["folder"] == "there and empty":
        target.mkdir()
    mesh._comm.Barrier()
    given = {
        "model": case.model(mesh, tp_sp=drawn["tp_sp"]),
        "folder": drawn["folder.type"](target),
        "tokenizer": drawn["tokenizer"],
        "max_file_bytes": drawn["max_file_bytes"],
    }
    return Call(save, given, lambda _: judge_saved(case, target, given))


def judge_saved(case: Case, target: Path, given: Values) -> None:
    """Compare the files in the folder, read by safetensors and json, with the model."""
    limit, files = given["max_file_bytes"], sorted(target.glob("*.safetensors"))
    weights, found = case.kept_weights(), dict[str, Tensor]()
    sizes = list[list[int]]()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not a dict
        sizes.append([x.nbytes for x in tensors.values()])
        assert limit is None or len(tensors) == 1 or sum(sizes[-1]) <= limit
        assert not found.keys() & tensors.keys()
        found |= tensors
    assert limit is None or all(sum(a) + max(b) > limit for a, b in pairwise(sizes))
    assert found.keys() == weights.keys()
    assert all(
        torch.equal(x, weights[name].to(x.dtype)) and x.dtype == getattr(torch, case.dtype)
        for name, x in found.items()
    )
    assert LlamaConfig.from_dict(json.loads((target / "config.json").read_text())) == case.config
    texts = [path.read_text() for path in target.glob("tokenizer.json")]
    assert texts == ([] if given["tokenizer"] is None else [given["tokenizer"].to_str(pretty=True)])
    assert (target / f"{WEIGHTS}.index.json").exists() == (len(files) > 1)


def gridded(mesh: sp.Mesh, drawn: Values) -> Call:
    """Return the call of `Grid.of` on a mesh."""
    given = {"mesh": mesh, "scheme": drawn["scheme"]}
    return Call(Grid.of, given, partial(judge_grid, mesh, drawn["scheme"]))


DEFAULTS = {"": "allgather_kv", "ring": "ring", "ulysses": "ulysses"}
"""The default scheme by the axis that splits a sequence; with two such axes it is "hybrid"."""


def judge_grid(mesh: sp.Mesh, scheme: str | None, grid: Grid) -> None:
    """Check a grid's scheme, and that each group has the ranks that differ along its axes only."""
    axes = tuple(axis for axis in mesh.axes if axis in DEFAULTS)
    name, chosen = scheme or DEFAULTS.get(" ".join(axes), "hybrid"), cast("Any", grid.attention)
    assert chosen.func is (SCHEMES_BY_NAME | {"hybrid": sp.hybrid_attention})[name]
    assert chosen.keywords.get("axes", axes) == axes
    places = torch.arange(mesh.size).view(*mesh.axes.values())
    own = dict(zip(mesh.axes, (int(x) for x in (places == mesh.rank).nonzero()[0]), strict=True))
    inside = {
        "tensor": ("tp",),
        "sequence": ("ring", "ulysses"),
        "stages": ("pp",),
        "replicas": ("dp",),
        "data": ("dp", "ring", "ulysses"),
        "model": ("pp", "ring", "ulysses", "tp"),
        "everyone": tuple(mesh.axes),
    }
    for name, axes in inside.items():
        index = tuple(slice(None) if axis in axes else own[axis] for axis in mesh.axes)
        group = getattr(grid, name)
        found = sp.all_gather(torch.tensor([mesh.rank], device=group.device), comm=group)
        assert found.tolist() == places[index].flatten().tolist(), name


SUBJECTS = [
    on_mesh(
        "llama.create",
        architecture("config", ARCHITECTURE | {"layers": SMALL["layers"]})
        | meshes(*AXES)
        | MADE
        | {"seed": {**values(0, 10**30, -7), "1 to 99": lambda c, v: c.randint(1, 99)}}
        | FEW_CALLS,
        models.lengths,
        created,
        allowed=("seed=far out",),
    ),
    on_mesh(
        "llama.load",
        architecture("folder", SMALL)
        | FOLDER
        | meshes(*AXES)
        | MADE
        | {"dtype": {**MADE["dtype"], "of the file": lambda c, v: None}}
        | FEW_CALLS,
        models.lengths,
        loaded,
        in_folder=True,
        together=({"folder.more": "angles and a tied head", "dtype": "of the file"},),
    ),
    Subject(
        "llama.Checkpoint.read",
        architecture("folder", SMALL)
        | FOLDER
        | {
            "name": values(
                *(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo"),
                "model.embed_tokens.weight",
                "model.norm.weight",
            ),
            "placement": values(
                "replicated",
                "split",
                "pieces of rows",
                "pieces of columns",
                "pieces of rows, from the end",
            ),
            "rank": spans((0, 0), (1, 3)),
        },
        read,
        lambda drawn: 1,
        covers=tuple(
            f"llama.Checkpoint{name}" for name in ("", ".shape", ".dtype", ".fingerprint")
        ),
    ),
    on_mesh(
        "llama.save",
        architecture("model", SMALL | {"dtype": values(*DTYPES)})
        | meshes(*("ring, ulysses", "tp", "dp", "ring, tp", "tp, dp, ring"))
        | {
            "tp_sp": values(False, True),
            "folder": values("new", "there and empty", "below folders that are missing"),
            "folder.type": FOLDER["folder.type"],
            "tokenizer": {"none": lambda c, v: None, "of bytes": lambda c, v: byte_tokenizer()},
            "max_file_bytes": {
                **values(None, 1, 10**12),
                "some": lambda c, v: c.randint(500, 4000),
            },
        }
        | ONE_CALL,
        models.lengths,
        saved,
        in_folder=True,
        allowed=("max_file_bytes=far out",),
    ),
    on_mesh(
        "llama.Grid.of",
        meshes(*AXES, "ulysses, ring") | {"scheme": MADE["scheme"]} | FEW_CALLS,
        models.lengths,
        gridded,
        covers=("llama.Grid", "llama.Grid.check_one_stage"),
        outside=dict.fromkeys(
            ("tensor", "sequence", "stages", "replicas", "data", "model", "everyone", "attention"),
            "`Grid.of` makes it",
        ),
    ),
]
