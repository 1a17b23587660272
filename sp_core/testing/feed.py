"""Examples that come from another process: what a launch does for an engine that runs outside of it."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection
from pathlib import Path

from sp_core.launch.watch import RUN_DIR
from sp_core.testing.plan import Example, Plan, Spec, Try

NAME = "feed"


def listen(directory: Path) -> socket.socket:
    """The place in a launch's directory where the launch will ask for examples."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / NAME))
    listener.listen(1)
    return listener


def plan() -> Plan | None:
    """The plan of a launch that is fed; None for all others."""
    path = Path(os.environ.get(RUN_DIR, ""), NAME)
    return Fed(path) if RUN_DIR in os.environ and path.exists() else None


class Fed:
    """Tries the examples that come, one by one, and sends back what came of each; ends when no more will come.

    Args:
        path: of the socket.
    """

    def __init__(self, path: Path) -> None:
        self.passed: list[Example] = []
        self.failed: dict[type[BaseException], Example] = {}
        self._path = path

    def run(self, spec: Spec, attempt: Try) -> None:
        """Serve."""
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(self._path))
        with Connection(client.detach()) as connection:
            while (example := _received(connection)) is not None:
                connection.send(attempt(example))


def _received(connection: Connection) -> Example | None:
    try:
        example: Example = connection.recv()
    except (EOFError, ConnectionResetError):
        return None
    return example
