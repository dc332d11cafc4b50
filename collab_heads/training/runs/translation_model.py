"""Make a translation model fit what the flags ask for: its languages, what of it is trained, its limits."""

import re
from argparse import Namespace
from collections.abc import Collection, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.errors import ArgumentError

CODE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")  # of a language and its script: deu_Latn


def set_languages(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str | None, target: str | None
) -> None:
    """Tell the tokenizer its languages, where it has codes for them, and the model's generation config the target.

    Raises:
        ArgumentError: if there are codes, and none for one of the languages.
    """
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
    """Language -> id of its code; empty for tokenizers without codes. NLLB keeps them among its special tokens."""
    codes = getattr(tokenizer, "lang_code_to_id", None)
    if codes is None and hasattr(tokenizer, "src_lang"):
        special = tokenizer.all_special_tokens
        codes = {token: tokenizer.convert_tokens_to_ids(token) for token in special if CODE.fullmatch(token)}
    return codes or {}


def freeze_unsaved(model: PreTrainedModel) -> None:
    """Freeze what `save_pretrained` leaves out: Marian's positions, trainable after `from_pretrained` and not before.

    They have no gradient, but optimizers count them, and DDP waits for them.
    """
    for name, parameter in model.named_parameters():
        if name in (model._keys_to_ignore_on_save or ()):
            parameter.requires_grad_(False)


def freeze(model: PreTrainedModel, patterns: Sequence[str], frozen: Collection[str] | None = None) -> None:
    """Leave only some parameters trainable; those that the model itself keeps frozen stay so.

    Args:
        model: changed in place.
        patterns: regular expressions, looked for in the parameters' names.
        frozen: names, from a checkpoint, instead: a swap may have renamed what the patterns named.

    Raises:
        ArgumentError: on a pattern that is none, or that matches nothing.
    """
    parameters = dict(model.named_parameters())
    if frozen is None:
        for pattern in patterns:
            check_pattern(pattern, list(parameters))
        frozen = {name for name in parameters if not any(re.search(pattern, name) for pattern in patterns)}
    for name in parameters.keys() & frozen:
        parameters[name].requires_grad_(False)


def check_pattern(pattern: str, names: Sequence[str]) -> None:
    """Raise ArgumentError unless a regular expression is one and matches a name."""
    try:
        matched = any(re.search(pattern, name) for name in names)
    except re.error as error:
        raise ArgumentError(f"--trainable_parameters {pattern!r} is no regular expression: {error}") from error
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
