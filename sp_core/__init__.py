"""Sequence-parallel and tensor-parallel Transformers over MPI. Importing this package does not start MPI."""
