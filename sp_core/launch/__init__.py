"""Start ranks, watch them, and say where each one was: `sp-core run`.

Nothing but the standard library is imported.
"""
