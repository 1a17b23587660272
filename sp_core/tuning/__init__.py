"""Predict the time of collectives on this machine, and choose the quickest algorithm for "auto".

`sp-core doctor --measure` measures the constants of a machine, a `Tuning`, and saves them in a
file. `find`, `load`, `latest` and `save` read and write such files. `predict` and `decide` compute
from the constants. Nothing here communicates or imports MPI.
"""

from sp_core.tuning.files import (
    FOLDER as FOLDER,
    VARIABLE as VARIABLE,
    FileError as FileError,
    default_path as default_path,
    find as find,
    latest as latest,
    load as load,
    save as save,
)
from sp_core.tuning.model import (
    LINKS as LINKS,
    Curve as Curve,
    Tuning as Tuning,
    decide as decide,
    modelled as modelled,
    predict as predict,
)
