"""The exceptions of the library: few, and each one a subclass of the builtin that a caller would catch."""


class ShapeError(ValueError):
    """Sizes that do not fit together: a tensor, a sharding, a mask or a mesh."""


class DtypeError(TypeError):
    """A dtype that the operation cannot take, or two that must agree and do not."""


class DeviceError(ValueError):
    """A tensor that lives on another device than its communicator, or a device that is not there."""


class CheckpointError(ValueError):
    """A model folder that cannot be used: something is missing, broken, or of a kind that is not supported."""


class RankError(RuntimeError):
    """Something that concerns the ranks: a communicator that cannot be used, or an error on another rank."""


class CollectiveMismatch(RankError):
    """The ranks of a communicator called different operations, or one operation with arguments that do not agree."""


class PeerFailed(RankError):
    """Another rank left the operation with an error, so this rank cannot finish it."""
