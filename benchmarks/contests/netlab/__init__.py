"""Collectives and ring attention over an emulated network: `nox -s netlab`."""
