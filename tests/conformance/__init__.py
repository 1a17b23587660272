"""Other libraries over several ranks, put through the laws of our own: `nox -s conformance`.

There are two subjects: attention (`attention.py`), and tensor-parallel layers with sequence
parallelism (`layers.py`). A library is called as its documentation says, on problems of our
strategies, and judged by our reference and tolerance. Every "wrong" comes with a script that
shows it with that library alone; the session runs the script too. Faults planted in libraries
(`planted.py`) show that a column would notice.
"""
