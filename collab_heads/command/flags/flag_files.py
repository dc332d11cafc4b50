"""Files of flags: JSON, or YAML where PyYAML is installed; `collab-heads glue config.json --seed 1`."""

import json
from collections.abc import Mapping
from typing import Any

from collab_heads.base.extras import check_extra
from collab_heads.errors import ArgumentError, DataError
from collab_heads.files.reading import parse_json, read_text

YAML = (".yaml", ".yml")
SUFFIXES = (".json", *YAML)


def is_flag_file(argument: str) -> bool:
    """Return True if the first argument of a command is, by its name, a file of flags."""
    return not argument.startswith("-") and argument.lower().endswith(SUFFIXES)


def read_flags(file: str) -> dict[str, Any]:
    """Read the flags of a file: names, with or without the two hyphens, and values.

    Raises:
        DataError: if there is no such file, or it does not hold a single object.
        MissingPackageError: if it is YAML and PyYAML is not installed.
    """
    try:
        text = read_text(file)
        flags = parse_yaml(text) if file.lower().endswith(YAML) else parse_json(text)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{file}: not a file of flags: {str(error).splitlines()[0]}") from error
    if not isinstance(flags, dict):
        raise DataError(f'{file}: a file of flags is one object, such as {{"seed": 1}}, not a {type(flags).__name__}')
    return {str(name).removeprefix("--"): value for name, value in flags.items()}


def parse_yaml(text: str) -> Any:
    """Parse a YAML text of plain values."""
    check_extra("yaml", "flags in YAML")
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from error


def as_argument(value: Any) -> str:
    """Format a value as it is written on the command line: {"enc-self": 32} as enc-self=32."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ",".join(f"{name}={as_argument(each)}" for name, each in value.items())
    if isinstance(value, list) or value is None:
        raise ValueError(f"{json.dumps(value)} is not one value")
    if isinstance(value, bool):
        raise ValueError(f'{json.dumps(value)} is no value for it (a word, such as "no", is written in quotes)')
    return repr(value)


TRAINER = {  # of Hugging Face's run_glue.py, run_translation.py and Trainer, today's and older ones
    "--fp16": "--mixed_precision fp16",
    "--bf16": "--mixed_precision bf16",
    "--fp16_opt_level": "--mixed_precision fp16",
    "--do_train": "nothing: runs train, unless --num_train_epochs is 0",
    "--do_eval": "nothing: runs evaluate after every epoch, or every --eval_steps",
    "--evaluate_during_training": "nothing: runs evaluate after every epoch, or every --eval_steps",
    "--evaluation_strategy": "nothing for epochs, --eval_steps N for steps",
    "--eval_strategy": "nothing for epochs, --eval_steps N for steps",
    "--eval_all_checkpoints": "nothing: runs evaluate after every epoch, or every --eval_steps",
    "--save_strategy": "--checkpointing_steps epoch, or a number of steps",
    "--save_steps": "--checkpointing_steps",
    "--overwrite_cache": "nothing: data are read anew in every run; tokenized pairs of other data have other names",
    "--max_seq_length": "--max_length",
    "--model_type": "nothing: the config of the model names its type (run_translation.py has it for new models)",
    "--config_name": "nothing: the config is that of the model (run_translation.py has it for new models)",
    "--per_gpu_train_batch_size": "--per_device_train_batch_size",
    "--per_gpu_eval_batch_size": "--per_device_eval_batch_size",
    "--train_batch_size": "--per_device_train_batch_size",
    "--eval_batch_size": "--per_device_eval_batch_size",
    "--max_steps": "--max_train_steps",
    "--warmup_steps": "--num_warmup_steps",
    "--max_train_examples": "--max_train_samples",
    "--max_val_samples": "--max_eval_samples",
    "--max_predict_samples": "--do_predict without it: test splits are short",
    "--label_smoothing_factor": "--label_smoothing (run_translation.py)",
    "--generation_max_length": "--val_max_target_length (run_translation.py)",
    "--generation_num_beams": "--num_beams (run_translation.py)",
    "--predict_with_generate": "nothing: run_translation.py translates in every evaluation",
    "--no_cuda": "--cpu",
    "--use_cpu": "--cpu",
    "--local_rank": "nothing: start several processes with `accelerate launch`",
    "--hub_private_repo": "nothing: make the repository on the Hub first, as it shall be",
    "--use_auth_token": "--hub_token, or `hf auth login`",
    "--token": "--hub_token, or `hf auth login`",
    "--optim": "nothing: AdamW, with --adam_beta1, --adam_beta2 and --adam_epsilon",
    "--early_stopping_threshold": "--early_stopping_patience, without a threshold",
    "--metric_for_best_model": "nothing: it is the metric of the task, or BLEU",
    "--greater_is_better": "nothing: of the metric of the task, and of BLEU, more is better",
    "--ignore_pad_token_for_loss": "nothing: padding has no part in the loss",
    "--forced_bos_token": "--target_lang",
    "--source_column": "--source_lang, the name of the column",
    "--target_column": "--target_lang, the name of the column",
    "--logging_dir": "--with_tracking: the logs lie in --output_dir",
    "--disable_tqdm": "the environment variable TQDM_DISABLE=1",
}
COLLABORATIVE = {  # epfml/collaborative-attention
    "--mix_heads": "--collaborative",
    "--mix_size": "--collaborative --dim_shared_query_key",
    "--mix_decomposition_tol": "--decomposition_tol",
    "--restricted_attention": "--score_terms content or context",
    "--context_attention_only": "--score_terms context for 1, --score_terms content for 0",
}
GATED = {  # lena-voita/the-story-of-heads
    "--concrete_heads": "--target_heads or --gate_weight, with --gated_sites for the types of attention",
    "--concrete_coef": "--gate_weight: summed over heads, so divide theirs by the number of gated attention modules",
    "--hp": "--d_model, --num_layers, --num_heads, --d_ff, --dropout (run_translation.py)",
    "--train-src": "--train_file SOURCE TARGET",
    "--train-dst": "--train_file SOURCE TARGET",
    "--dev-src": "--validation_file SOURCE TARGET",
    "--dev-dst": "--validation_file SOURCE TARGET",
    "--folder": "--output_dir",
    "--num-batches": "--max_train_steps",
    "--batch-len": "--max_tokens (run_translation.py)",
    "--optimizer-opts": "--gradient_accumulation_steps",
    "--pre-init-model-checkpoint": "--model_name_or_path",
}
ROTATED = {  # omerlandau/MHR-NLP-Transformers, and the parts of fairseq that it is run with
    "--mhr-experiment": "--rotation_schedule FILE, the same file",
    "--gamma-conf": "--alpha_mixing --alpha_growth_weight: beside a mean loss, theirs by the target tokens of a step",
    "--radius": "--alpha_growth_radius",
    "--loss-start-after": "--alpha_start",
    "--enc-self-alpha-loss-ratio": "--alpha_growth_weight enc-self=X: weight times ratio",
    "--dec-self-alpha-loss-ratio": "--alpha_growth_weight dec-self=X: weight times ratio",
    "--dec-enc-alpha-loss-ratio": "--alpha_growth_weight dec-enc=X: weight times ratio",
    "--keep-alphas-eval": "--save_head_statistics",
    "--save-heads-cos_sim": "--save_head_statistics",
    "--head-confidence-method": "--rotation_metric (advanced: confidence), per epoch --analyze_every epoch",
    "--dynamic-type": "--rotate enc-self=soft,dec-self=hard,...: S is soft, H hard, L local, R random",
    "--dynamic-max-switches": "--rotation_count; for soft --rotation_layer_pairs, with --rotation_count 4",
    "--dynamic-swap-frequency": "--rotation_frequency",
    "--dynamic-rest": "--rotation_rest",
    "--start-dynamic-mhr": "--rotation_start",
    "--dynamic-end-epoch": "--rotation_end",
    "--max-tokens": "--max_tokens (run_translation.py)",
    "--update-freq": "--gradient_accumulation_steps",
    "--max-epoch": "--num_train_epochs",
    "--max-update": "--max_train_steps",
    "--lr": "--learning_rate",
    "--warmup-updates": "--num_warmup_steps",
    "--clip-norm": "--max_grad_norm",
    "--save-dir": "--output_dir",
    "--restore-file": "--resume_from_checkpoint",
}
OLD_FLAGS = TRAINER | COLLABORATIVE | GATED | ROTATED


def check_old_flag(flag: str) -> None:
    """Raise ArgumentError for a flag of another script; the message says what to use instead."""
    if flag in OLD_FLAGS:
        raise ArgumentError(f"unknown flag {flag!r}: here, use {OLD_FLAGS[flag]}")
