"""Load models, with errors that say what was asked for."""

from argparse import Namespace
from contextlib import suppress
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError
from transformers import PretrainedConfig

from collab_heads.errors import ArgumentError, CollabHeadsError
from collab_heads.registry import check_custom_code
from collab_heads.training.runs.config_sizes import check_sizes

DAMAGED = (EOFError, SafetensorError, UnpicklingError)  # what readers raise on truncated files


def load_or_explain(auto: Any, source: str, **kwargs: Any) -> Any:
    """`from_pretrained` of an Auto class, with an error that says what was asked for.

    Raises:
        ArgumentError: if there is no such model, its config names sizes that no model has, or it does not fit.
    """
    check_sizes(source)
    try:
        return auto.from_pretrained(source, **kwargs)
    except CollabHeadsError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, *DAMAGED) as error:
        refuse_custom_code(source)
        reason, backend = str(error).strip().split("\n")[0], kwargs.get("attn_implementation")
        asked = f" with --attn_implementation {backend} (without it sdpa is used)" if backend else ""
        raise ArgumentError(f"cannot load {auto.__name__} from {source!r}{asked}: {reason}") from error


def refuse_custom_code(source: str) -> None:
    """Raise UnsupportedModelError if a model that cannot be loaded has attention of its own; else do nothing."""
    with suppress(OSError, ValueError):
        config, _ = PretrainedConfig.get_config_dict(source)
        check_custom_code(config.get("model_type"), config.get("auto_map"))


def backend_options(args: Namespace) -> dict[str, str]:
    """How `from_pretrained` is told the attention backend that the flags name, if they name one."""
    return {"attn_implementation": args.attn_implementation} if args.attn_implementation else {}
