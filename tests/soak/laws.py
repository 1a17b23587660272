"""Which test files the short profile consists of."""

NAMES = ("mask",)

FILES = tuple(f"tests/test_{name}.py" for name in NAMES)
