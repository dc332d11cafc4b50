"""The errors of this package. Every message names the object, the value and the way out."""


class CollabHeadsError(Exception):
    """The base class of all errors that this package raises on purpose."""


class UnsupportedModelError(CollabHeadsError, TypeError):
    """The toolkit cannot change the model, or the wrapper around it."""


class UnsupportedVersionError(CollabHeadsError, ImportError):
    """The toolkit does not work with the installed version of transformers; the message names the versions it needs."""


class ArgumentError(CollabHeadsError, ValueError):
    """An argument has an invalid value: a width, a role, a path, a method."""


class ShapeError(CollabHeadsError, ValueError):
    """The shapes of two tensors, or of a tensor and a module, do not match; the message holds both shapes."""


class NonFiniteError(CollabHeadsError, ValueError):
    """Weights or calibration inputs contain NaN or inf; the message names the site."""


class CalibrationError(CollabHeadsError, ValueError):
    """The calibration batches are empty, or the model cannot take them."""


class SwapError(CollabHeadsError, RuntimeError):
    """The state of the model does not allow the swap, for example because it is already swapped."""


class ConfigError(CollabHeadsError, ValueError):
    """`config.collab_heads` does not fit the model or this version of the package."""


class DataError(CollabHeadsError, ValueError):
    """A file of examples is missing, malformed or does not fit the task; the message names the file and the line."""


class OutputError(CollabHeadsError, OSError):
    """An output folder is in use, or a checkpoint cannot be resumed."""
