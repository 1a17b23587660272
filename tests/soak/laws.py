"""Which test files the short profile consists of: laws over drawn examples, and of the kit what draws or waits.

About half a minute for each stage on two idle cores. What takes long for what it draws (decoding, pipelines, attention kernels) is
left to `nox -s tests`.
"""

_NAMES = (
    *("sharding", "mask", "rope", "attention", "attention_tiles"),
    *("transfer", "link", "schedules", "algorithms", "collectives", "plans", "window", "staged", "overlap"),
    *("mesh", "errors", "autograd", "tp_sp", "schemes", "scheme_laws", "layers", "loss", "llama", "scheduling", "unequal"),
    *("kit_adjoint", "kit_comm", "kit_engine", "kit_faults", "kit_requests", "kit_threads"),
)
FILES = tuple(f"tests/test_{name}.py" for name in _NAMES)
