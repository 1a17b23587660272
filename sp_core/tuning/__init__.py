"""Choose the quickest algorithm from constants that were measured on this machine. No MPI."""

from sp_core.tuning.constants import LINKS, Curve, Tuning, on_grid
from sp_core.tuning.decide import decide
from sp_core.tuning.files import FileError, default_path, find, latest, load, save
from sp_core.tuning.model import Prediction, modelled, predict

__all__ = [
    "LINKS",
    "Curve",
    "FileError",
    "Prediction",
    "Tuning",
    "decide",
    "default_path",
    "find",
    "latest",
    "load",
    "modelled",
    "on_grid",
    "predict",
    "save",
]
