"""Register the device `late` in every Python program that imports sp_core.transport.

With this folder on the PYTHONPATH, `SP_ON=late ci/gpu.sh` runs without a GPU.
"""

import importlib.machinery
import sys
from typing import Any

AFTER = "sp_core.transport"


class Finder:
    """An import hook that imports the device's plugin after the package sp_core.transport."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of sp_core.transport, whose loader then imports `device.plugin`.

        Return None for any other module, so that Python asks its next finder.
        """
        if name != AFTER:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            import device.plugin  # noqa: F401 - makes torch and sp_core know it

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
