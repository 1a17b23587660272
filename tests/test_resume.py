"""Test a training that stops on one mesh and resumes on another: its bits and its losses."""

import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copy, copytree
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from kit.case_resume import trained
from llama_cases import Case, cases, mesh_of
from studies.commands import ROOT, outside, printed
from test_llama_checkpoint import NORM, contents, cut, edit, shared

import sp_core as sp
from benchmarks.training.contest import divergence
from sp_core.launch.command import AS_ROOT, ENVIRONMENT, find_mpiexec
from sp_core.llama import Llama, create
from sp_core.llama.train import RECORD, load_training, save_training, train_step
from sp_core.testing import given, run_threads, spmd

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "fused AdamW": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AMSGrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
}
SCHEDULES = torch.optim.lr_scheduler
FLOATS: Any = [1.0, 3.0, 4.0]
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "milestones": partial(SCHEDULES.MultiStepLR, milestones=[1, 3, 4]),
    "milestones that are floats": partial(SCHEDULES.MultiStepLR, milestones=FLOATS),
    "warm-up, then milestones": lambda optimizer: SCHEDULES.SequentialLR(
        optimizer,
        [SCHEDULES.LinearLR(optimizer, 0.1, 1.0, 2), SCHEDULES.MultiStepLR(optimizer, [1, 3])],
        [2],
    ),
    "one cycle": partial(SCHEDULES.OneCycleLR, max_lr=0.02, total_steps=9),
    "plateau": SCHEDULES.ReduceLROnPlateau,
}
CASE = Case((6, 3), layers=1)
ENTRIES = ("of", "step", "groups", "state", "schedule", "random")


class Training:
    """A model with the optimizer, scheduler, generator and step of its training.

    One weight is frozen and has no moments.
    """

    def __init__(self, model: Llama, optimizer: str, scheduler: str, seed: int = 0) -> None:
        self.model, weights = model, list(model.parameters())
        weights[1].requires_grad_(False)
        groups = [{"params": weights[:2]}, {"params": weights[2:], "weight_decay": 0.0}]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.generator = torch.Generator().manual_seed(seed)
        self.step: Any = 0

    @property
    def parts(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optimizer", "scheduler", "generator")}

    def go(self, steps: int) -> list[float]:
        """Train on tokens that the generator draws. Return the learning rate after each step."""
        rates = []
        for _ in range(steps):
            drawn = torch.randint(0, 8, (11,), generator=self.generator).tolist()
            train_step(self.model, self.optimizer, [drawn[:8], drawn[8:]], max_norm=1.0)
            if self.scheduler is not None:
                late = isinstance(self.scheduler, SCHEDULES.ReduceLROnPlateau)
                self.scheduler.step(*[1.0] * late)
            rates.append(self.optimizer.param_groups[0]["lr"])
            weight = next(self.model.parameters())
            self.optimizer.state[weight] |= {
                "count": self.step,
                "rates": [*rates],
                "last": {"a": rates[-1]},
                "third": torch.tensor(1 / 3, dtype=self.model.dtype, device=weight.device),
                "seconds": torch.tensor(1 / 3, dtype=torch.float64, device=weight.device),
                "half": torch.tensor(0.5, dtype=torch.bfloat16, device=weight.device),
                "tokens": torch.tensor(2**53 + 1, device=weight.device),
                "exact": weight.detach().double() / 3,
                "text": "cosine",
                "own": ["cosine", ["a", {"b": "c"}], {}, [{}], {"0": 1.5}, {"a": [1, None, True]}],
            }
        self.step += steps
        return rates

    def save(self, folder: Path, **options: Any) -> None:
        save_training(self.model, folder, step=self.step, **self.parts, **options)

    def load(self, folder: Path) -> None:
        self.step = load_training(self.model, folder, **self.parts)


@given(
    max_ranks=4,
    max_examples=12,
    case=cases(max_layers=1),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    few=st.integers(1, 4),
    meshes=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    tp_sp=st.tuples(st.booleans(), st.booleans()),
    steps=st.integers(0, 3),
    limit=st.sampled_from([None, 500]),
)
def test_a_training_goes_on_with_the_same_bits_on_any_mesh(
    comm: Any,
    case: Case,
    optimizer: str,
    scheduler: str,
    few: int,
    meshes: tuple[int, int],
    tp_sp: tuple[bool, bool],
    steps: int,
    limit: int | None,
    tmp_path: Path,
) -> None:
    """Some ranks train and save. A different training, of all ranks, loads that and goes on.

    If it saves what it has loaded, the files are the same byte for byte.
    """
    folder, is_one, rates = shared(comm, tmp_path), comm.rank < few, [0.0]
    some = comm.Split(int(is_one), comm.rank)
    if is_one:
        with mesh_of(some, meshes[0]) as mesh:
            before = Training(case.model(mesh, tp_sp=tp_sp[0]), optimizer, scheduler)
            before.go(steps)
            before.save(folder / "before", max_file_bytes=limit)
            rates = before.go(2)
    rates = comm.bcast(rates)
    with mesh_of(comm, meshes[1]) as mesh:
        made = {"seed": 9, "dtype": getattr(torch, case.dtype), "tp_sp": tp_sp[1]}
        after = Training(create(case.config, mesh, **made), optimizer, scheduler, seed=9)
        after.go(1)
        after.optimizer.param_groups[0]["foreach"] = False  # it was saved as None
        after.load(folder / "before")
        assert after.step == steps
        after.save(folder / "after", max_file_bytes=limit)
        assert contents(folder / "before") == contents(folder / "after")
        assert after.go(2) == rates
    some.Free()


@spmd(1, 2)
def test_a_training_is_loaded_as_it_was_saved(comm: Any, tmp_path: Path) -> None:
    """One scheduler reads a Counter of milestones only when it takes over from another.

    `save` refuses a model with other parts: its weights have names that `load` does not know.
    """
    folder = shared(comm, tmp_path)
    with mesh_of(comm, 0) as mesh:
        for kind, has_others in (*((kind, False) for kind in SCHEDULERS), ("none", True)):
            before, after = (Training(CASE.model(mesh), "fused AdamW", kind) for _ in range(2))
            for layer in [x.model.layers[0] for x in (before, after)] * has_others:
                layer.input_layernorm = torch.nn.Sequential(layer.get_submodule("input_layernorm"))
            before.go(1)
            saved = folder / f"{kind} {has_others}"
            before.save(saved)
            after.load(saved)
            states = [
                (x.optimizer.state_dict(), x.scheduler and x.scheduler.state_dict())
                for x in (before, after)
            ]
            assert len({*map(repr, states)}) == 1
            assert after.go(4) == before.go(4)
            pairs = zip(before.model.parameters(), after.model.parameters(), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)


def edited(change: Callable[[Any], object], folder: Path) -> None:
    edit(folder / RECORD, lambda x: (change(x), None)[1])


def drop(name: str, values: dict[str, Any]) -> None:
    del values[name]


def first(values: dict[str, Any]) -> Any:
    return values[next(iter(values))]


def rate(value: object) -> Callable[[Any], object]:
    return lambda x: x["groups"][1].update(lr=value)


def count(value: object) -> Callable[[Any], object]:
    return lambda x: first(x["state"]).update(step=value)


def other(name: str) -> Callable[[Path], object]:
    return lambda folder: copy(folder.with_name("wider") / name, folder / name)


BROKEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "cut-off weights": ("is broken", cut("model.safetensors")),
    "cut-off moments": ("is broken", cut("optimizer/model.safetensors")),
    "a cut-off record": ("cannot be read", cut(RECORD)),
    "no record": ("of save_training", lambda f: (f / RECORD).unlink()),
    "weights of another model": (r"has shape \(", other("model.safetensors")),
    "moments of another model": (r"has shape \(", other("optimizer/model.safetensors")),
    "no configuration": ("config.json is not there", lambda f: (f / "config.json").unlink()),
    "a cut-off configuration": ("config.json cannot be read", cut("config.json")),
    "the configuration of another model": (
        "config.json .*hidden_size 12, now 10",
        other("config.json"),
    ),
    "another model": (
        "hidden_size 12, now 10",
        lambda f: copytree(f.with_name("wider"), f, dirs_exist_ok=True),
    ),
    "a record of something else": (
        f"{RECORD} .* step is missing; of is missing; ",
        lambda f: (f / RECORD).write_text('{"format": 1}'),
    ),
    "a record of an older version": (
        f"{RECORD} has format None, and this version of sp_core reads 1. If the file is damaged",
        lambda f: edited(lambda x: drop("format", x), f),
    ),
    "a record of a newer version": (
        f"{RECORD} has format 2, and this",
        lambda f: edited(lambda x: x.update(format=2), f),
    ),
}
"""A part of the error, and a change of the folder."""
EDITED: dict[str, tuple[str, Callable[[Any], object]]] = {
    **{f"no {name}": (f"{name} is missing", partial(drop, name)) for name in ENTRIES},
    "a step in words": ("step is 'one', needed int", lambda x: x.update(step="one")),
    "a list of kinds": (r"of is \[\], needed dict", lambda x: x.update(of=[])),
    "a group less": ("groups have the params", lambda x: x["groups"].pop()),
    "a group in words": (
        "groups have the params .*False",
        lambda x: x["groups"].__setitem__(0, "a"),
    ),
    "other parameters": (
        "groups have the params",
        lambda x: x["groups"][0].update(params=[0]),
    ),
    "a rate in words": ("lr of a group is .x., needed such as 0.0", rate("x")),
    "a rate of null": ("lr of a group is None", rate(None)),
    "a rate of true": ("lr of a group is True", rate(value=True)),
    "one beta": (
        r"betas of a group is \[0.9\], needed such as \(0.9, 0.999\)",
        lambda x: x["groups"][0].update(betas=[0.9]),
    ),
    "a step below 0": ("step is -3, needed at least 0", lambda x: x.update(step=-3)),
    "no rate": ("groups lack .*'lr'", lambda x: x["groups"][1].pop("lr")),
    "a stranger's state": ("state has 'x'", lambda x: x["state"].update(x={})),
    "a state in words": ("state has .*'a'", lambda x: x["state"].update({NORM: "a"})),
    "a parameter less": ("state lacks .*exp_avg", lambda x: x["state"].pop(NORM)),
    "no moments": ("state lacks .*exp_avg", lambda x: x["state"].clear()),
    "no count of steps": ("KeyError: 'step'", lambda x: first(x["state"]).pop("step")),
    "a count in words": ("'str'", count({"": "a", "dtype": "float32"})),
    "a count without a dtype": ("KeyError: 'dtype'", count({"": 1})),
    "a count of a dtype that torch lacks": ("no attribute 'f32'", count({"": 1, "dtype": "f32"})),
    "no milestones": ("schedule lacks .*milestones", lambda x: x["schedule"].pop("milestones")),
    "no random state": ("RNG state", lambda x: x.update(random="00")),
    "a random state in words": ("hexadecimal", lambda x: x.update(random="zz")),
}
"""A part of the error, and an edit of the record."""
BROKEN |= {
    f"a record with {what}": (
        f"{RECORD} cannot be loaded: .*{text}.*Copy it again",
        partial(edited, change),
    )
    for what, (text, change) in EDITED.items()
}


@spmd(3)
def test_a_broken_checkpoint_is_refused_on_every_rank_and_changes_nothing(
    comm: Any, tmp_path: Path
) -> None:
    folder = shared(comm, tmp_path)
    with mesh_of(comm, 0) as mesh:
        for name, hidden in (("wider", 12), ("good", 10)):
            case = Case((6, 3), layers=1, hidden=hidden)
            training = Training(case.model(mesh), "AdamW", "milestones")
            training.go(1)
            training.save(folder / name)
        training.go(1)
        training.save(folder / "now")
        for what, (text, damage) in BROKEN.items():
            if comm.rank == 0:
                damage(Path(copytree(folder / "good", folder / what)))
            comm.Barrier()
            with pytest.raises(sp.CheckpointError, match=text) as caught:
                training.load(folder / what)
            assert len(set(comm.allgather(str(caught.value)))) == 1
        own = type("MultiStepLR", (SCHEDULES.MultiStepLR,), {"load_state_dict": float})
        training.scheduler.__class__ = own  # it takes no dict
        with pytest.raises(TypeError, match="not 'dict'"):
            training.load(folder / "good")
        training.step = np.int64(2)
        training.save(folder / "later")
        assert contents(folder / "now") == contents(folder / "later")


STEPS = int(os.environ.get("SP_TRAINING_STEPS", "10"))
KILLED, EVERY = STEPS * 3 // 5, STEPS // 5
"""The step after which the training is killed, and the steps between checkpoints."""
MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp": 3})


def launched(folder: Path, axes: dict[str, int], killed: int) -> int | None:
    """Train under mpiexec, from the last checkpoint. Return the exit code, None if time is up."""
    numbers = map(str, (STEPS, EVERY, killed))
    program = (sys.executable, str(ROOT / "tests/kit/case_resume.py"), str(folder))
    command = (find_mpiexec(), "-n", str(math.prod(axes.values())), *program, json.dumps(axes))
    code, text = printed(
        (*command, *numbers), ROOT, ENVIRONMENT | AS_ROOT | outside(), seconds=60 + 3 * STEPS
    )
    print(text)
    return code


@pytest.mark.mpi_skip
@pytest.mark.starts_mpi
def test_a_killed_training_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """SIGKILL comes in the middle of a checkpoint, so training resumes from the one before.

    Losses are compared with an unbroken run on one rank. They may differ by ten times what a change
    of the weights by one unit in the last place makes.
    """
    alone, *others = (
        [
            loss
            for _, loss in run_threads(1, partial(trained, axes={"tp": 1}, steps=STEPS, ulps=n))[0]
        ]
        for n in range(3)
    )
    curve = {"dtype": "float64", "losses": alone, "perturbed": others}
    assert launched(tmp_path, MESHES[0], KILLED) != 0
    names = sorted(path.name for path in tmp_path.glob("*step-*"))
    (left,) = [name for name in names if name.startswith(".")]
    assert left.startswith(f".step-{KILLED:06}.")
    assert names[1:] == [f"step-{step:06}" for step in range(EVERY, KILLED, EVERY)]
    assert launched(tmp_path, MESHES[1], 0) == 0
    found = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    assert [step for step, _ in found[KILLED:]] == [*range(KILLED - EVERY + 1, STEPS + 1)]
    resumed = dict(found)
    ratio = divergence([resumed[step + 1] for step in range(STEPS)], curve)
    apart = max(abs(loss - alone[step - 1]) for step, loss in found)
    print(f"{STEPS} steps: {ratio:.3f} of what is allowed, {apart:.1e} apart; loss {alone[-1]:.3f}")
    assert ratio <= 1
