"""Define the exceptions: each is a subclass of the builtin that a caller would catch."""

AGREED = "rank_of_agreement"
"""Name of an attribute of errors that all ranks raise. It is true on a rank if another rank prints
the error in full."""


class ShapeError(ValueError):
    """Report sizes that do not fit together: of a tensor, a sharding, a mask or a mesh."""


class DtypeError(TypeError):
    """Report a dtype that the operation cannot take, or two dtypes that must agree and do not."""


class DeviceError(ValueError):
    """Report a tensor on another device than its communicator, or a device that is not there."""


class CheckpointError(ValueError):
    """Report a model folder with something missing, broken, or not supported."""


class RankError(RuntimeError):
    """Report a communicator that cannot be used, or an error on another rank."""


class CollectiveMismatch(RankError):
    """Report ranks that called different operations, or one operation with different arguments."""


class PeerFailed(RankError):
    """Report that another rank left the operation with an error, so this rank cannot finish it."""


def short_text(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if it has no text."""
    return str(error).partition("\n")[0] or type(error).__name__
