"""A device for torch without hardware, `late`, on which the code for CUDA runs.

Its memory cannot be read by the host, and its streams run nothing before somebody waits for it.
`runtime.h` says how. `nox -s device` runs the tests that need it, with a C++ compiler.
"""
