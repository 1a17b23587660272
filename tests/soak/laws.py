"""Which test files the short profile consists of: laws over drawn examples, and of the kit what draws or waits.

About half a minute for each stage on two idle cores. What takes long for what it draws (decoding, pipelines, attention kernels), or
long and draws nothing, is left to `nox -s tests`.
"""

_NAMES = (
    *("sharding", "mask", "rope", "attention", "attention_tiles"),
    *("transfer", "link", "schedules", "algorithms", "collectives", "plans", "window", "staged", "overlap"),
    *("mesh", "errors", "autograd", "tp_sp", "schemes", "scheme_laws", "layers", "loss", "llama", "scheduling", "unequal"),
    *("kit_adjoint", "kit_comm", "kit_engine", "kit_requests", "kit_threads"),
)
FILES = tuple(f"tests/test_{name}.py" for name in _NAMES)
LEFT_OUT = (
    "tests/test_autograd.py::test_the_global_map_has_right_first_and_second_derivatives",
    "tests/test_layers.py::test_a_block_does_not_know_by_which_ways_its_collectives_go",
)
"""The same at each run, and half of its time."""
