"""Define the exceptions: each is a subclass of the builtin that a caller would catch."""

AGREED = "rank_of_agreement"
"""Attribute of an error that all ranks raise: true on those for which another one prints it."""


class ShapeError(ValueError):
    """Sizes that do not fit together: a tensor, a sharding, a mask or a mesh."""


class DtypeError(TypeError):
    """A dtype that the operation cannot take, or two that must agree and do not."""


class DeviceError(ValueError):
    """Report a tensor on another device than its communicator, or a device that is not there."""


class CheckpointError(ValueError):
    """Report a model folder with something missing, broken, or not supported."""


class RankError(RuntimeError):
    """Report a communicator that cannot be used, or an error on another rank."""


class CollectiveMismatch(RankError):
    """Report ranks that called different operations, or one with different arguments."""


class PeerFailed(RankError):
    """Another rank left the operation with an error, so this rank cannot finish it."""
