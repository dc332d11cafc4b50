"""The model of a command, and its tokenizer."""

from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.errors import ArgumentError
from collab_heads.registry import get_adapter
from collab_heads.training.runs.loading import load_or_explain

MODULES = "modules.json"  # of sentence-transformers: the parts that a model goes through, and their folders


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
    check_folder(Path(args.model))
    remote = {"trust_remote_code": args.trust_remote_code}
    config = load_or_explain(AutoConfig, args.model, **remote)
    named = getattr(transformers, (config.architectures or ["AutoModel"])[0], AutoModel)
    model = load_or_explain(named, args.model, dtype=torch.float32, **({} if named is not AutoModel else remote))
    get_adapter(model)
    if len(args.data) == 2 and not model.config.is_encoder_decoder:
        raise ArgumentError(f"--data has two files, and {type(model).__name__} takes one: it does not translate")
    try:
        tokenizer = load_or_explain(AutoTokenizer, args.model, **remote)
        return Loaded(model.to(args.device), tokenizer, config.dtype or torch.float32)
    except RuntimeError as error:
        raise ArgumentError(f"--device {args.device}: {str(error).splitlines()[0]}") from error


def check_folder(folder: Path) -> None:
    """Raise ArgumentError for a folder of sentence-transformers whose model lies in a folder of its own."""
    inner = folder / "0_Transformer"
    if (folder / MODULES).is_file() and not (folder / "config.json").exists() and inner.is_dir():
        raise ArgumentError(f"{folder} is of sentence-transformers: the model in it is {inner}, give that")
