"""Measurements of sp_core: the scaling experiment, and a record for every case."""
