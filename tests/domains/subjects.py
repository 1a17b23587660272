"""List every subject: the public calls that have a declared domain."""

from __future__ import annotations

from domains import (
    attention,
    blocks,
    collectives,
    commands,
    config,
    cost,
    decoding,
    exact,
    folders,
    gradients,
    layers,
    linear,
    losses,
    masks,
    meshes,
    models,
    numeric,
    pipelines,
    placements,
    plans,
    scheduling,
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
    *models.SUBJECTS,
    *training.SUBJECTS,
    *decoding.SUBJECTS,
    *folders.SUBJECTS,
    *config.SUBJECTS,
    *scheduling.SUBJECTS,
    *pipelines.SUBJECTS,
    *cost.SUBJECTS,
    *commands.SUBJECTS,
]
BY_NAME = {subject.name: subject for subject in SUBJECTS}
