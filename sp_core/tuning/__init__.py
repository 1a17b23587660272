"""Predict the time of collectives on this machine, and choose the quickest algorithm for "auto".

`sp-core doctor --measure` measures the constants of a machine, a `Tuning`, and saves them in a
file. `find`, `load`, `latest` and `save` read and write such files. `predict` and `decide` compute
from the constants. Nothing here communicates or imports MPI.
"""

from sp_core.tuning.files import FileError, default_path, find, latest, load, save
from sp_core.tuning.model import LINKS, Curve, Tuning, decide, modelled, predict

__all__ = [
    "LINKS",
    "Curve",
    "FileError",
    "Tuning",
    "decide",
    "default_path",
    "find",
    "latest",
    "load",
    "modelled",
    "predict",
    "save",
]
