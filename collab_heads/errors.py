"""What can go wrong. Every message names the object, the value and the way out."""


class CollabHeadsError(Exception):
    """Any error raised by this package on purpose."""


class UnsupportedModelError(CollabHeadsError, TypeError):
    """The model, or the wrapper around it, is not one that the toolkit can change."""


class UnsupportedVersionError(CollabHeadsError, ImportError):
    """The installed version of transformers is not one that the toolkit works with; the message names those."""


class ArgumentError(CollabHeadsError, ValueError):
    """An argument has a value that cannot work: a width, a role, a path, a method."""


class ShapeError(CollabHeadsError, ValueError):
    """Two tensors, or a tensor and a module, do not fit each other; the message holds both shapes."""


class NonFiniteError(CollabHeadsError, ValueError):
    """Weights or calibration inputs contain NaN or inf; the message names the site."""


class CalibrationError(CollabHeadsError, ValueError):
    """The calibration batches are empty, or the model cannot take them."""


class SwapError(CollabHeadsError, RuntimeError):
    """The model is in a state that does not allow the swap, such as swapped already."""


class ConfigError(CollabHeadsError, ValueError):
    """`config.collab_heads` does not fit the model or this version of the package."""


class DataError(CollabHeadsError, ValueError):
    """A file of examples is missing, malformed or does not fit the task; the message names the file and the line."""


class OutputError(CollabHeadsError, OSError):
    """An output folder is in use, or a checkpoint is not one to go on from."""
