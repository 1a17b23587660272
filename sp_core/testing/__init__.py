"""Test programs whose ranks communicate.

`given` and `spmd` make tests whose body runs on several ranks. `CheckedComm` and `CheckedGroup`
compare the calls of all ranks, so a mistake is an error instead of a hang. A pytest plugin makes
one report for all ranks.

Submodules are imported when they are used, so that the plugin and the launcher cost nothing where
they are merely installed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
