"""Every subject: the public calls that have a declared domain."""

from __future__ import annotations

from domains import (
    attention,
    blocks,
    collectives,
    config,
    decoding,
    exact,
    folders,
    gradients,
    layers,
    linear,
    llama,
    losses,
    masks,
    meshes,
    numeric,
    placements,
    plans,
    sampling,
    training,
)

SUBJECTS = [
    *attention.SUBJECTS,
    *collectives.SUBJECTS,
    *plans.SUBJECTS,
    *meshes.SUBJECTS,
    *exact.SUBJECTS,
    *masks.SUBJECTS,
    *numeric.SUBJECTS,
    *linear.SUBJECTS,
    *layers.SUBJECTS,
    *blocks.SUBJECTS,
    *losses.SUBJECTS,
    *placements.SUBJECTS,
    *gradients.SUBJECTS,
    *llama.SUBJECTS,
    *training.SUBJECTS,
    *decoding.SUBJECTS,
    *sampling.SUBJECTS,
    *folders.SUBJECTS,
    *config.SUBJECTS,
]
BY_NAME = {subject.name: subject for subject in SUBJECTS}
