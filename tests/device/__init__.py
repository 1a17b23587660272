"""Provide `late`, a torch device without hardware on which the code for CUDA runs.

The host cannot read its memory. Its streams run work as late as possible: only when something waits
for the result. `runtime.h` explains how. `nox -s device` runs its tests, and needs a C++ compiler.
"""
