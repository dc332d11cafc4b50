"""The work of the commands that write models for engines, and run models of any kind on files."""

import io
from argparse import Namespace
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import PreTrainedModel

from collab_heads.base.progress import progress_bar
from collab_heads.command.inputs import load, load_tokenizer
from collab_heads.contract.registry import is_lone_decoder
from collab_heads.data.parallel import read_lines
from collab_heads.errors import UnsupportedModelError
from collab_heads.evaluation.evaluate import evaluate
from collab_heads.evaluation.report import EvaluationReport
from collab_heads.evaluation.task import Limits
from collab_heads.evaluation.tasks import Translation
from collab_heads.files.atomic import write_file
from collab_heads.running.batches import evaluating
from collab_heads.running.translations import generate
from collab_heads.serving.export import TARGETS, ExportReport, export
from collab_heads.serving.loading import is_exported, load_exported
from collab_heads.serving.sentence_encoder import is_sentence_encoder, sentence_encoder


def run_export(args: Namespace) -> ExportReport:
    """Export a model, print the result, and return the report."""
    TARGETS[args.to].check_installed(args.int8)
    loaded = load(args)
    model = encoder_part(loaded.model)
    options = {"int8": args.int8, "per_layer": args.per_layer}
    report = export(model, args.output_dir, args.to, tokenizer=loaded.tokenizer, **options)
    print(report)
    return report


def run_encode(args: Namespace) -> dict:
    """Write the embeddings of the lines of a file as an array, and return how many there are, and how wide."""
    lines = read_lines(Path(args.file))
    options = {"batch_size": args.batch_size, "prompt_name": args.prompt_name}
    if is_exported(args.model):
        found = load_exported(args.model).encode(lines, **options)
    else:
        model = encoder_part(load(args).model)
        if not is_sentence_encoder(model):
            raise UnsupportedModelError(
                f"{args.model} is no sentence encoder: it has no modules.json of sentence-transformers, which says how "
                "the states of the tokens become an embedding"
            )
        found = sentence_encoder(model).encode(model, lines, **options)
    content = io.BytesIO()
    np.save(content, found)
    write_file(args.output, content.getvalue())
    print(f"{len(found):,} embeddings of {found.shape[1]} numbers: {args.output}")
    return {"texts": len(found), "width": found.shape[1], "output": str(args.output)}


def run_generate(args: Namespace) -> dict:
    """Write the translation, or the continuation, of each line of a file, and return how many there are."""
    lines = read_lines(Path(args.file))
    model, tokenizer = opened(args)
    if not model.can_generate():
        raise UnsupportedModelError(
            f"{args.model} generates no text: give a translation model or a language model, with its head"
        )
    texts = [line for line in lines if line.strip()]
    if is_lone_decoder(model.config):
        made = [continued(args, model, tokenizer, text) for text in progress_bar(texts, desc="generating")]
    else:
        reads = Limits(args.batch_size, args.max_length, args.source_prefix)
        made = Translation([texts], args.file, reads).answers(model, tokenizer)
    in_order = iter(made)
    found = [next(in_order) if line.strip() else "" for line in lines]
    write_file(args.output, "".join(f"{' '.join(text.splitlines())}\n" for text in found).encode())
    print(f"{len(found):,} texts: {args.output}")
    return {"texts": len(found), "output": str(args.output)}


def opened(args: Namespace) -> tuple[Any, Any]:
    """Return the model that the flags name, stock, changed or exported, and its tokenizer."""
    if is_exported(args.model):
        found = load_exported(args.model)
        return found, load_tokenizer(str(found.folder), {})
    return load(args)[:2]


def continued(args: Namespace, model: Any, tokenizer: Any, line: str) -> str:
    """Return what a language model writes after a line, at most `--max_new_tokens`, each the most probable one."""
    text = args.source_prefix + line
    read = tokenizer(text, truncation=True, max_length=args.max_length, return_tensors="pt")
    batch = {name: read[name] for name in ("input_ids", "attention_mask")}
    with evaluating(model):
        ids = generate(model, batch, do_sample=False, num_beams=1, max_new_tokens=args.max_new_tokens)
    return tokenizer.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def encoder_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that sentence-transformers loads: of a sentence encoder that without a head."""
    base = cast(PreTrainedModel, model.base_model)
    return base if is_sentence_encoder(base) else model


def run_evaluate(args: Namespace) -> EvaluationReport:
    """Score models on a task, print the result, and return the report."""
    report = evaluate(
        args.original,
        {name: name for name in args.changed},
        task=args.task,
        data=args.data,
        columns=args.column,
        batch_size=args.batch_size,
        max_length=args.max_length,
        source_prefix=args.source_prefix,
        device=args.device,
        seed=args.seed,
    )
    print(report)
    return report
