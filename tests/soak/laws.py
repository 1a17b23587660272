"""List the test files of the short profile: laws over drawn examples, and of the kit what waits.

About a minute for both stages together on two idle cores. What takes long for what it draws
(decoding, pipelines, kernels of attention), or long and draws nothing, is left to `nox -s tests`.
"""

_MEETING = (
    *("algorithms", "plans", "window", "transports", "overlap", "mesh", "autograd", "schemes"),
    *("scheme_laws", "link", "kit_comm", "kit_engine"),
)
_ALONE = ("sharding", "mask", "attention", "errors", "kit_threads")
FILES = tuple(f"tests/test_{name}.py" for name in (*_ALONE, *_MEETING))
THREADS_ONLY = tuple(f"tests/test_{name}.py" for name in _ALONE)
"""What is the same under mpiexec, or takes most of its time there."""
LEFT_OUT = ("tests/test_autograd.py::test_the_global_map_has_right_first_and_second_derivatives",)
"""The same at each run, and half of its time."""
