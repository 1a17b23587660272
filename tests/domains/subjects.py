"""Every subject: the public calls that have a declared domain."""

from __future__ import annotations

from domains import (
    attention,
    blocks,
    collectives,
    exact,
    gradients,
    layers,
    linear,
    losses,
    masks,
    meshes,
    numeric,
    placements,
    plans,
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
]
BY_NAME = {subject.name: subject for subject in SUBJECTS}
