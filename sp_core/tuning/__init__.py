"""Choose the quickest algorithm from constants that were measured on this machine. No MPI."""

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
