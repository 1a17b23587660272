"""Measurements of sp_core: the scaling experiment. Run `nox -s scaling`, or `python -m benchmarks.scaling --help`."""
