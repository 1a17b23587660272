"""Start the ranks of a program, watch them, and report how each ended: `sp-core run`.

`command` starts and ends a launch, `bounded` any program with a time limit. `watch` runs inside
each rank and leaves files; `deaths` and `results` read them. The package imports no torch and no
MPI.
"""
