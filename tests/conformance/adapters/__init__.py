"""How each library is called.

A module of another library imports torch and that library alone, because it is pasted into scripts.
Each module has `prepare(comm, variant)`, for a new process group over all ranks. The other name is
on trial: the function `attend` returns the attention of this rank's tokens, (B, S/P, H, D); the
class `Pair` is a module with a column-parallel layer `up` and a row-parallel one `down`.
"""
