"""Trace one step of a transformer block on all ranks (`nox -s trace`), for Perfetto."""
