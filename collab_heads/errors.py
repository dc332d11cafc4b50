"""The errors of this package. Every message names the object, the value and the way out."""

LONGEST = 3000  # characters of a message


class CollabHeadsError(Exception):
    """The base class of all errors that this package raises on purpose.

    The middle of a message that quotes a value of thousands of characters is left out.
    """

    def __str__(self) -> str:
        said = super().__str__()
        return said if len(said) <= LONGEST else f"{said[: LONGEST // 2]} … {said[-LONGEST // 4 :]}"


class UnsupportedModelError(CollabHeadsError, TypeError):
    """Raised if the toolkit cannot change the model, or the wrapper around it."""


class UnsupportedVersionError(CollabHeadsError, ImportError):
    """Raised if the toolkit does not support the installed version of transformers; the message names those it does."""


class ArgumentError(CollabHeadsError, ValueError):
    """Raised if an argument has an invalid value: a width, a role, a path, a method."""


class LoadError(ArgumentError):
    """Raised if there is no such model, config or tokenizer, or it is damaged; the message names it."""


class ShapeError(CollabHeadsError, ValueError):
    """Raised if the shapes of two tensors, or of a tensor and a module, do not match; the message holds both shapes."""


class NonFiniteError(CollabHeadsError, ValueError):
    """Raised if weights or calibration inputs contain NaN or inf; the message names the site."""


class CalibrationError(CollabHeadsError, ValueError):
    """Raised if the calibration batches are empty, or the model cannot take them."""


class ModelStateError(CollabHeadsError, RuntimeError):
    """Raised if the state of the model does not allow what was asked for: it is already swapped, or has gates."""


class ConfigError(CollabHeadsError, ValueError):
    """Raised if `config.collab_heads` does not fit the model or this version of the package."""


class DataError(CollabHeadsError, ValueError):
    """Raised if a file of examples is missing, malformed or does not fit the task; the message names file and line."""


class OutputError(CollabHeadsError, OSError):
    """Raised if an output folder is in use, or a checkpoint cannot be resumed."""
