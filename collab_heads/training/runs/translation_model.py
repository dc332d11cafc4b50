"""Make translation models from a few sizes and their vocabulary from the data; set languages, freeze parameters."""

import re
from argparse import Namespace
from collections.abc import Collection, Sequence
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
from collab_heads.contract.registry import blueprints
from collab_heads.data.parallel import Corpus
from collab_heads.data.tokenizing import train_tokenizer
from collab_heads.errors import ArgumentError
from collab_heads.saving.loading import backend_options, load_or_explain
from collab_heads.training.options.tasks import COLLABORATIVE_FROM_SCRATCH, TRANSLATION_SIZES, sizes_of


def untrained(args: Namespace, corpus: Corpus, folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make the model and the tokenizer that the flags describe.

    Args:
        args: the flags of a model from scratch, and the collaborative ones.
        corpus: its training pairs give the vocabulary, unless `--tokenizer_name` does.
        folder: holds the files of the tokenizer as long as it is used.
    """
    config = load_or_explain(AutoConfig, args.config_name) if args.config_name else None
    model_type = args.model_type if config is None else config.model_type
    longest = max(args.max_source_length, args.max_target_length, args.val_max_target_length or 0)
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
        config = collaborative_config(config, **{name: getattr(args, name) for name in COLLABORATIVE_FROM_SCRATCH})
    try:
        return AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32, **backend_options(args)), tokenizer
    except ImportError as error:
        raise ArgumentError(
            f"--attn_implementation {args.attn_implementation} (without it sdpa is used): {error}"
        ) from error
    except ValueError as error:  # such as a width that is not a multiple of the heads
        raise ArgumentError(f"no {model_type} of these sizes: {error}") from error


def sizes(args: Namespace, longest: int) -> dict:
    """Return the sizes that the flags give, under the names that the config of the model type uses."""
    wanted = sizes_of(args, TRANSLATION_SIZES)
    if wanted["d_model"] % wanted["num_heads"]:
        raise ArgumentError(f"--d_model {wanted['d_model']} is not a multiple of --num_heads {wanted['num_heads']}")
    wanted |= {"max_length": longest, "d_head": wanted["d_model"] // wanted["num_heads"]}
    names = blueprints()[args.model_type].sizes
    return {in_config: wanted[name] for name, in_configs in names.items() for in_config in in_configs}


def tokens_of(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> dict:
    """Return the settings of a config that depend on the vocabulary; decoders start from padding, as in Marian, T5."""
    size, pad, eos = len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id
    every = {"pad_token_id": pad, "eos_token_id": eos, "decoder_start_token_id": pad, "bos_token_id": None}
    some = {"forced_eos_token_id": eos, "decoder_vocab_size": size}  # with a forced end T5's config could not be saved
    return every | {"vocab_size": size} | {name: value for name, value in some.items() if hasattr(config, name)}


CODE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")  # of a language and its script: deu_Latn


def set_languages(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str | None, target: str | None
) -> None:
    """Set the languages of a tokenizer that has codes for them, and the target in the model's generation config."""
    codes = language_codes(tokenizer)
    if not codes:
        return
    for flag, language in (("source_lang", source), ("target_lang", target)):
        if language not in codes:
            raise ArgumentError(
                f"--{flag} {language!r} is not one of the model's {len(codes)} languages, such as "
                f"{', '.join(list(codes)[:8])}"
            )
    code = codes[str(target)]
    tokenizer.src_lang = source
    tokenizer.tgt_lang = target
    # the labels begin with the code (mBART-50, M2M100, NLLB), or end with it and the decoder starts from it (mBART)
    begins = tokenizer(text_target="")["input_ids"][0] == code
    name = "forced_bos_token_id" if begins else "decoder_start_token_id"
    model.generation_config.update(**{name: code})


def language_codes(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return language -> id of its code, {} for tokenizers without codes; NLLB's are among its special tokens."""
    codes = getattr(tokenizer, "lang_code_to_id", None)
    if codes is None and hasattr(tokenizer, "src_lang"):
        special = tokenizer.all_special_tokens
        codes = {token: tokenizer.convert_tokens_to_ids(token) for token in special if CODE.fullmatch(token)}
    return codes or {}


def freeze_unsaved(model: PreTrainedModel) -> None:
    """Freeze what `save_pretrained` leaves out: Marian's positions, which are trainable after `from_pretrained`.

    They have no gradient, but optimizers count them, and DDP waits for them.
    """
    for name, parameter in model.named_parameters():
        if name in (model._keys_to_ignore_on_save or ()):
            parameter.requires_grad_(False)


def freeze(model: PreTrainedModel, patterns: Sequence[str], frozen: Collection[str] | None = None) -> None:
    """Freeze all parameters but those that match a pattern; what the model itself keeps frozen stays frozen.

    Args:
        model: changed in place.
        patterns: regular expressions, looked for in the parameters' names.
        frozen: names of what to freeze, from a checkpoint, instead of patterns: a swap may have renamed parameters.
    """
    parameters = dict(model.named_parameters())
    if frozen is None:
        for pattern in patterns:
            check_pattern(pattern, list(parameters))
        frozen = {name for name in parameters if not any(re.search(pattern, name) for pattern in patterns)}
    for name in parameters.keys() & frozen:
        parameters[name].requires_grad_(False)


def check_pattern(pattern: str, names: Sequence[str]) -> None:
    """Raise ArgumentError if a pattern is not a regular expression, or matches none of the names."""
    try:
        matched = any(re.search(pattern, name) for name in names)
    except re.error as error:
        raise ArgumentError(f"--trainable_parameters {pattern!r} is not a regular expression: {error}") from error
    if not matched:
        raise ArgumentError(
            f"--trainable_parameters {pattern!r} matches no parameter; they are named like {names[len(names) // 2]!r}"
        )


def check_fits(args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ArgumentError if the model has too few positions, or its tokenizer no token for dropped words."""
    positions = getattr(model.config, "max_position_embeddings", None)
    for flag in ("max_source_length", "max_target_length", "val_max_target_length"):
        if positions is not None and (getattr(args, flag) or 0) > positions:
            raise ArgumentError(
                f"--{flag} {getattr(args, flag)}: the model has {positions} positions; ask for so many at most"
            )
    if args.word_dropout and args.word_dropout_with == "unknown" and tokenizer.unk_token_id is None:
        raise ArgumentError(
            f"--word_dropout {args.word_dropout}: the tokenizer has no token for unknown words: "
            "--word_dropout_with random"
        )
