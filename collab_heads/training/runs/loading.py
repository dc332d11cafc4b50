"""Load models, and name data."""

import hashlib
import json
from pickle import UnpicklingError

from safetensors import SafetensorError

from collab_heads.errors import ArgumentError, CollabHeadsError
from collab_heads.training.data.glue import Data

DAMAGED = (EOFError, SafetensorError, UnpicklingError)  # what readers raise on truncated files


def load_or_explain(auto, source: str, **kwargs):
    """`from_pretrained` of an Auto class, with an error that says what was asked for.

    Raises:
        ArgumentError: if there is no such model, or it does not fit.
    """
    try:
        return auto.from_pretrained(source, **kwargs)
    except CollabHeadsError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        ImportError,
        EOFError,
        SafetensorError,
        UnpicklingError,
    ) as error:
        reason, backend = str(error).strip().split("\n")[0], kwargs.get("attn_implementation")
        asked = f" with --attn_implementation {backend} (without it sdpa is used)" if backend else ""
        raise ArgumentError(f"cannot load {auto.__name__} from {source!r}{asked}: {reason}") from error


def digest(data: Data) -> str:
    """A short name for the examples: a resumed run must see the same ones."""
    return hashlib.sha256(json.dumps(dict(data.splits), sort_keys=True).encode()).hexdigest()[:16]
