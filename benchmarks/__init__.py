"""Measurements of sp_core: the scaling experiment (`nox -s scaling`), and a record for every case (`nox -s bench`)."""
