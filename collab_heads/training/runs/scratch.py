"""Translation models from scratch: a config from a few sizes, a vocabulary from the data."""

from argparse import Namespace
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from collab_heads.collaborative.scratch import collaborative_config
from collab_heads.errors import ArgumentError
from collab_heads.model.loading import backend_options, load_or_explain
from collab_heads.registry import blueprints
from collab_heads.training.data.parallel import Corpus
from collab_heads.training.data.vocabulary import train_tokenizer
from collab_heads.training.flags.translation_arguments import DEFAULT_SIZES
from collab_heads.training.runs.machine import check_memory


def untrained(args: Namespace, corpus: Corpus, folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make the model and the tokenizer that the flags describe.

    Args:
        args: from `add_scratch_arguments`, and the collaborative ones.
        corpus: its training pairs give the vocabulary, unless `--tokenizer_name` does.
        folder: for the files of the tokenizer, as long as it is used.

    Raises:
        CollabHeadsError: on sizes that do not fit each other, or a vocabulary that the data does not allow.
    """
    config = load_or_explain(AutoConfig, args.config_name) if args.config_name else None
    model_type = args.model_type if config is None else config.model_type
    longest = max(args.max_source_length, args.max_target_length, args.val_max_target_length or 0)
    check_sizes(args, config, longest)
    if args.tokenizer_name:
        tokenizer = load_or_explain(AutoTokenizer, args.tokenizer_name, use_fast=not args.use_slow_tokenizer)
    else:
        pairs = corpus.splits["train"]
        languages = {"source_lang": args.source_lang, "target_lang": args.target_lang}
        tokenizer = train_tokenizer(
            model_type, pairs["source"] + pairs["target"], args.vocab_size, folder, max_length=longest, **languages
        )
    config = config or AutoConfig.for_model(model_type, **sizes(args, longest), **blueprints()[model_type].usual)
    for name, value in tokens_of(tokenizer, config).items():
        setattr(config, name, value)
    if args.collaborative:
        width, kind = args.dim_shared_query_key, args.kind
        config = collaborative_config(
            config,
            dim_shared_query_key=width,
            dim_value=args.dim_value,
            kind=kind,
            mixing_init=args.mixing_init,
            sites=args.sites,
        )
    try:
        return AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32, **backend_options(args)), tokenizer
    except ImportError as error:
        raise ArgumentError(
            f"--attn_implementation {args.attn_implementation} (without it sdpa is used): {error}"
        ) from error
    except ValueError as error:  # such as a width that is not a multiple of the heads
        raise ArgumentError(f"no {model_type} of these sizes: {error}") from error


def check_sizes(args: Namespace, config: PretrainedConfig | None, longest: int) -> None:
    """Check that the model can be trained in the memory that there is, before any of it is made.

    Raises:
        ArgumentError: if it cannot.
    """
    given = {name: getattr(args, name) for name in DEFAULT_SIZES if getattr(args, name) is not None}
    wanted = DEFAULT_SIZES | {"vocab_size": args.vocab_size, "max_length": longest} | given
    if config is not None and config.model_type in blueprints():
        names = blueprints()[config.model_type].sizes
        wanted |= {name: getattr(config, its[0]) for name, its in names.items() if getattr(config, its[0], None)}
    width, inner = wanted["d_model"], wanted["d_ff"]
    # four projections of attention in the encoder and eight in the decoder, two of the feed-forward layer in both
    layers = wanted["num_layers"] * (12 * width * width + 4 * width * inner)
    tables = (wanted["vocab_size"] + 2 * wanted["max_length"]) * width
    named = {name: wanted[name] for name in ("d_model", "num_layers", "d_ff", "vocab_size", "max_length")}
    check_memory(layers + tables, ", ".join(f"{name} {value}" for name, value in named.items()), args.cpu)


def sizes(args: Namespace, longest: int) -> dict:
    """The sizes that the flags give, under the names that the config of the model type has for them."""
    given = {name: getattr(args, name) for name in DEFAULT_SIZES}
    wanted = DEFAULT_SIZES | {name: value for name, value in given.items() if value is not None}
    if wanted["d_model"] % wanted["num_heads"]:
        raise ArgumentError(f"--d_model {wanted['d_model']} is not a multiple of --num_heads {wanted['num_heads']}")
    wanted |= {"max_length": longest, "d_head": wanted["d_model"] // wanted["num_heads"]}
    names = blueprints()[args.model_type].sizes
    return {in_config: wanted[name] for name, in_configs in names.items() for in_config in in_configs}


def tokens_of(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> dict:
    """What a config must know of its vocabulary; decoders start from padding, as Marian's and T5's do."""
    size, pad, eos = len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id
    every = {"pad_token_id": pad, "eos_token_id": eos, "decoder_start_token_id": pad, "bos_token_id": None}
    some = {"forced_eos_token_id": eos, "decoder_vocab_size": size}  # with a forced end T5's config could not be saved
    return every | {"vocab_size": size} | {name: value for name, value in some.items() if hasattr(config, name)}
