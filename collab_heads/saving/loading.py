"""Check the sizes in the config of a folder before anything is built from them, and explain what cannot be loaded.

transformers builds what a config asks for: a billion layers, one after the other, or a list of their types that fills
the memory while the config is read.
"""

import json
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from collab_heads.base.checks import MAX_SIZE, is_list, missing_folder
from collab_heads.contract.registry import check_custom_code
from collab_heads.errors import ArgumentError, CollabHeadsError, LoadError
from collab_heads.model.refusals import is_finite
from collab_heads.saving.vocabularies import check_words

MAX_LAYERS = 2000  # the deepest models have about a thousand
BOUNDS = (  # pattern in the name of a field -> its largest value
    (re.compile(r"layer|depth"), MAX_LAYERS),
    (re.compile(r"size|dim|head|position|label|width|group|d_model|d_ff|d_kv|n_embd|n_inner|n_ctx"), MAX_SIZE),
)
OF_LABELS = "label2id"  # its keys are free text


def check_sizes(source: str) -> None:
    """Raise LoadError if a config, or the one in a folder, is no JSON or has an impossible size; the field is named."""
    file = Path(source) if os.path.isfile(source) else Path(source) / CONFIG_NAME
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError:  # loading it reports what is wrong
        return
    except (ValueError, RecursionError) as error:
        if file.suffix != ".json":
            return
        raise LoadError(f"{file} is damaged, or no JSON: {error}") from error
    for name, value in numbers(config):
        most = next((bound for pattern, bound in BOUNDS if pattern.search(name)), None)
        if most is not None and value > most:
            raise LoadError(
                f"{file}: {name} is {value!r:.40}, and no model has more than {most:,}: the file is damaged or edited"
            )


def numbers(part: object, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield the numbers in a part of a config, with the names of their fields."""
    if isinstance(part, dict):
        for key, value in part.items():
            yield from () if key == OF_LABELS else numbers(value, str(key))
    elif isinstance(part, list):
        for value in part:
            yield from numbers(value, name)
    elif isinstance(part, int | float) and not isinstance(part, bool):
        yield name, part


def load_or_explain(auto: Any, source: str | Path, **kwargs: Any) -> Any:
    """Call `from_pretrained` of an Auto class, with errors that name what was to be loaded.

    Raises:
        LoadError: if there is no such model, its config has impossible sizes, it does not fit, or it lacks weights.
        ArgumentError: if it cannot have the attention backend that was asked for, or its tokenizer knows no words,
            because its folder has none.
    """
    if hasattr(auto, "from_config") or issubclass(auto, PreTrainedModel):
        return with_missing(auto, source, **kwargs)[0]
    with opening(auto, source, kwargs):
        loaded = auto.from_pretrained(source, **kwargs)
        check_words(loaded, source)
        return loaded


@contextmanager
def opening(auto: Any, source: str | Path, options: Mapping[str, Any]) -> Iterator[None]:
    """Check the config of what is to be loaded, ask the Hub for it, and explain what goes wrong inside."""
    check_sizes(str(source))
    with explaining(auto.__name__, source, options.get("attn_implementation")):
        check_reachable(str(source))
        yield


def load_named(config: PretrainedConfig, source: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a model with the class that its config names, or the base model where the folder has nothing of a head.

    all-mpnet-base-v2 and other sentence encoders name the class that they were made from.

    Args:
        config: that of the model.
        source: a folder, or a name on the Hub.
        kwargs: as for `from_pretrained`.

    Raises:
        LoadError: as `load_or_explain`.
    """
    model, missing = with_missing(class_of(config), source, **kwargs)
    head = {name for name, _ in model.named_parameters() if not name.startswith(prefix_of_base(model))}
    return load_or_explain(AutoModel, source, **kwargs) if head and head <= missing else model


def with_missing(
    auto: Any, source: str | Path, *, ignore_mismatched_sizes: bool = False, **kwargs: Any
) -> tuple[PreTrainedModel, set[str]]:
    """Load a model, and return the names of the weights that it lacks, which are random.

    Args:
        auto: the class.
        source: a folder, or a name on the Hub.
        ignore_mismatched_sizes: whether weights of a head that have another shape are new.
        kwargs: as for `from_pretrained`.

    Raises:
        LoadError: if weights of its layers are missing, those of a head, a pooler or a mask may be; or weights have
            another shape, or contain NaN or inf.
    """
    with opening(auto, source, kwargs):
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # else it does not say which
        model, found = auto.from_pretrained(source, **options, **kwargs)
    missing, of_base = set(found["missing_keys"]), prefix_of_base(model)
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        if name.startswith(of_base) or not ignore_mismatched_sizes:
            raise LoadError(
                f"{str(source)!r:.200}: its weight {name} has the shape {[*stored]}, and its config asks for "
                f"{[*wanted]}: its config.json is of another model, or edited"
            )
    for name, weight in model.named_parameters():
        if not is_finite(weight):
            raise LoadError(
                f"{str(source)!r:.200}: its weight {name} contains NaN or inf: its training diverged, or it is damaged"
            )
    of_layers = [name for name in missing if any(part.isdigit() for part in name.split("."))]
    if lacking := sorted(name for name in of_layers if name.startswith(of_base)):
        raise LoadError(
            f"{str(source)!r:.200} lacks {len(lacking)} weights of the layers of its {type(model).__name__}, such as "
            f"{lacking[0]}: it is damaged, or its config.json is of another model"
        )
    return model, missing


def prefix_of_base(model: PreTrainedModel) -> str:
    """Return what the names of the base model's weights begin with."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


@contextmanager
def explaining(what: str, source: str | Path, backend: str | None = None) -> Iterator[None]:
    """Turn errors of loading a model, or of building it from its config, into ours that name it.

    Args:
        what: the name of the class.
        source: a folder, or a name on the Hub.
        backend: the attention backend, if one was asked for.

    Raises:
        UnsupportedModelError: if its attention is code that comes with it.
        ArgumentError: on any other error, if a backend was asked for and the model is there.
        LoadError: on any other error.
    """
    try:
        yield
    except CollabHeadsError:
        raise
    except Exception as error:  # whatever transformers, safetensors and torch raise about what they find
        is_missing = isinstance(error, OSError)
        if not is_missing:  # of a model that is not there: the Hub has been asked once
            refuse_custom_code(source)
        asked = f" with --attn_implementation {backend} (without it sdpa is used)" if backend else ""
        why = reason_of(error)
        if is_missing and not os.path.exists(source):
            why = f"{missing_folder(str(source))}, and {why}"
        wrong = ArgumentError if backend and not is_missing else LoadError
        raise wrong(f"cannot load {what} from {str(source)!r:.200}{asked}: {why}") from error


def reason_of(error: Exception) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    said = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else ""
    return said if isinstance(error, OSError | ValueError) and said else f"{type(error).__name__} {said}".strip()


def check_reachable(name: str) -> None:
    """Ask the Hub once for a model that is not on this machine; transformers would ask six times, for half a minute.

    Raises:
        LoadError: if the Hub cannot be reached. Answers of the Hub, such as that there is no such model, are left
            to transformers.
    """
    if os.path.isdir(name) or is_offline_mode():
        return
    with suppress(HFValidationError, HfHubHTTPError):
        if isinstance(try_to_load_from_cache(name, CONFIG_NAME), str):
            return
        try:
            get_hf_file_metadata(hf_hub_url(name, CONFIG_NAME), timeout=HF_HUB_ETAG_TIMEOUT)
        except (HFValidationError, HfHubHTTPError):
            raise
        except Exception as error:  # of the network, and of whatever talks to it
            raise LoadError(
                f"{missing_folder(name)}, and the Hub cannot be asked for it: {str(error) or type(error).__name__}"
            ) from error


def refuse_custom_code(source: str | Path) -> None:
    """Raise UnsupportedModelError if a model that cannot be loaded has attention code of its own."""
    config: Any = None
    with suppress(Exception):  # it was asked for because it cannot be loaded
        config, _ = PretrainedConfig.get_config_dict(source)
    if isinstance(config, dict) and isinstance(config.get("model_type"), str | None):
        check_custom_code(config.get("model_type"), config.get("auto_map"))


def check_device(device: str) -> None:
    """Raise ArgumentError if there is no such device; this needs no model."""
    with naming_device(device):
        if torch.empty(0, device=device).is_meta:
            raise RuntimeError("weights there have no values: choose cpu, or a GPU")


def placed(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Return a model after it was moved to a device."""
    with naming_device(device):
        return cast(Any, model).to(device)


@contextmanager
def naming_device(device: str) -> Iterator[None]:
    """Raise what goes wrong on a device as an ArgumentError that names it."""
    try:
        yield
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch was built without it, or finds none
        raise ArgumentError(f"device {device!r:.80}: {str(error).splitlines()[0]}") from error


def backend_options(args: Namespace) -> dict[str, str]:
    return {"attn_implementation": args.attn_implementation} if args.attn_implementation else {}


def class_of(config: PretrainedConfig) -> Any:
    """Return the class that a config names; AutoModel if it names none, or one that transformers lacks."""
    named = config.architectures or ["AutoModel"]
    if not is_list(named) or not isinstance(named[0], str):
        raise LoadError(f"{config.name_or_path}: its architectures are {named!r:.80}, must be a list of names")
    found = getattr(transformers, named[0], AutoModel)
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else AutoModel
