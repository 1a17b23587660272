"""Test programs whose ranks communicate.

`given` and `spmd` make tests whose body runs on several ranks. `CheckedComm` and `CheckedGroup`
check that all ranks make the same calls, so that a mistake raises an error instead of hanging. A
pytest plugin makes one report for all ranks.

Submodules are imported when they are used, so that the plugin and the launcher cost nothing if
they are only installed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
