"""The kit's pytest plugin, where it is not installed."""

from importlib.metadata import entry_points

NAME = "sp_core.testing.plugin"


def wanted() -> list[str]:
    """The arguments of pytest that load it: none where it is installed."""
    return (
        [] if any(entry.value == NAME for entry in entry_points(group="pytest11")) else ["-p", NAME]
    )
