"""Sequences of unequal length by policy, and a pipeline's bubble: `nox -s balance`."""
