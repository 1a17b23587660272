"""Load the kit's pytest plugin if it is not installed."""

from importlib.metadata import entry_points

NAME = "sp_core.testing.plugin"


def wanted() -> list[str]:
    """Return the arguments of pytest that load the plugin; [] if it is installed."""
    return (
        [] if any(entry.value == NAME for entry in entry_points(group="pytest11")) else ["-p", NAME]
    )
