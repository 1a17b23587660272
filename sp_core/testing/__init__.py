"""Tests of programs whose ranks communicate.

Property tests over ranks, checked communicators, one report for all ranks.

Nothing here is imported before it is used, so that the pytest plugin and the launcher cost nothing
where they are merely installed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
