"""Run a test session on several ranks: `sp-core run`, with a time limit of 600 seconds.

`python -m sp_core.testing.launch -n 4 -- python -m pytest --with-mpi tests`.
"""

import sys

from sp_core.launch.command import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m sp_core.testing.launch", timeout=600.0))
