"""What can go wrong. Every message names the object, the value and the way out."""


class CollabHeadsError(Exception):
    """Any error raised by this package on purpose."""


class UnsupportedModelError(CollabHeadsError, TypeError):
    """The model, or the wrapper around it, is not one that the toolkit can change."""


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
