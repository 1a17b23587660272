"""Call each library as its documentation says, one module for each.

The module of another library imports torch and that library alone, because it is pasted into
scripts. Each module has `prepare(comm, variant)`, which is called for a new process group over all
ranks. It also has the name that is tested. The function `attend` returns the attention of this
rank's tokens, (B, S/P, H, D). The class `Pair` is a module with a column-parallel layer `up` and a
row-parallel layer `down`.
"""
