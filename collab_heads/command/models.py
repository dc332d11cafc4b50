"""The model of a command, and its tokenizer."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from collab_heads.checks import is_list
from collab_heads.errors import ArgumentError, UnsupportedModelError
from collab_heads.extras import check_extra
from collab_heads.model.loading import load_or_explain
from collab_heads.registry import adapter_for_config, get_adapter


class Loaded(NamedTuple):
    """What a command works with: the model, of the class that its config names, in float32; its tokenizer; its dtype.

    Attributes:
        dtype: in which the model is stored.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype


def load(args: Namespace) -> Loaded:
    """Load the model that the flags name.

    Raises:
        ArgumentError: if there is none, it cannot be loaded, or does not fit the other flags.
        UnsupportedModelError: if it has no adapter.
    """
    remote = {"trust_remote_code": args.trust_remote_code}
    config = load_or_explain(AutoConfig, args.model, **remote)
    adapter_for_config(config)
    named, dtype = class_of(config), torch.float32 if config.dtype is None else config.dtype
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"{args.model}: the dtype in its config.json is {dtype!r:.80}, none that torch has")
    tokenizer = load_tokenizer(args.model, remote)
    model = load_or_explain(named, args.model, dtype=torch.float32, **({} if named is not AutoModel else remote))
    get_adapter(model)
    if len(getattr(args, "data", None) or ()) == 2 and not model.config.is_encoder_decoder:
        raise ArgumentError(f"--data has two files, and {type(model).__name__} takes one: it does not translate")
    device = getattr(args, "device", "cpu")
    try:
        return Loaded(model.to(device), tokenizer, dtype)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch was built without it, or finds none
        raise ArgumentError(f"--device {device}: {str(error).splitlines()[0]}") from error


def class_of(config: PretrainedConfig) -> Any:
    """The class that a config names; AutoModel where it names none, or one that transformers lacks.

    Raises:
        ArgumentError: if what it names is no text.
    """
    named = config.architectures or ["AutoModel"]
    if not is_list(named) or not isinstance(named[0], str):
        raise ArgumentError(f"{config.name_or_path}: its architectures are {named!r:.80}, must be a list of names")
    found = getattr(transformers, named[0], AutoModel)
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else AutoModel


def load_tokenizer(name: str, remote: Mapping) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Raises:
        MissingPackageError: if it is one of SentencePiece, which is not installed.
        ArgumentError: if there is none, or it cannot be loaded.
    """
    try:
        return load_or_explain(AutoTokenizer, name, **remote)
    except ArgumentError as error:
        if "sentencepiece" in str(error).lower():
            check_extra("train", "such tokenizers", ("sentencepiece",))
        raise


def check_class(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if the model was loaded as another class than it is: its head would be lost."""
    named = model.config.architectures
    if named and type(model).__name__ not in named:
        raise UnsupportedModelError(
            f"the model is a {named[0]}, which transformers lacks, and would lose its head as a "
            f"{type(model).__name__}: load it in Python, and change it there"
        )
