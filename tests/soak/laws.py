"""List the test files of the short profile: laws over drawn examples, and how the kit waits.

Both stages together take about a minute on two idle cores. Tests whose examples take long
(decoding, pipelines, kernels of attention), and long tests without examples, are left to
`nox -s tests`.
"""

_MEETING = (
    *("algorithms", "order", "window", "transports", "overlap", "mesh", "autograd", "schemes"),
    *("scheme_laws", "link", "kit_comm", "kit_engine"),
)
_ALONE = ("sharding", "mask", "attention", "errors", "kit_threads")
FILES = tuple(f"tests/test_{name}.py" for name in (*_ALONE, *_MEETING))
THREADS_ONLY = tuple(f"tests/test_{name}.py" for name in _ALONE)
"""Files that test the same under mpiexec, or take most of their time there."""
LEFT_OUT = ("tests/test_autograd.py::test_the_global_map_has_right_first_and_second_derivatives",)
"""A test that does the same in each run, and would take half of the run's time."""
