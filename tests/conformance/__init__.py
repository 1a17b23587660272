"""Test other libraries on several ranks by the laws of our own code: `nox -s conformance`.

There are two subjects: attention (`attention.py`), and tensor-parallel layers with sequence
parallelism (`layers.py`). A library is called as its documentation says, on problems drawn by our
strategies. Its results are compared with our reference, with our tolerance. Every wrong result
comes with a script that repeats it with that library alone; the session runs the script too. Faults
planted in libraries (`planted.py`) must be found.
"""
