r"""The command that shows the heads of a model.

    python -m collab_heads analyze sentence-transformers/all-MiniLM-L6-v2 --data text.txt --treebank dev.conllu
    python -m collab_heads analyze Helsinki-NLP/opus-mt-de-en --data dev.de.gz dev.en.gz --output_dir report

Text files have a sentence a line; gzipped where the name ends in .gz. A translation model takes two, or one and its own
translations. Labelled examples: `run_glue.py --analyze`.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.analysis.analyze import analyze_heads
from collab_heads.analysis.options import PARTS
from collab_heads.analysis.plots import check_matplotlib
from collab_heads.analysis.report.head_report import HeadReport
from collab_heads.analysis.treebank.conllu import read_conllu
from collab_heads.analysis.treebank.treebank import longest_input
from collab_heads.errors import ArgumentError, OutputError
from collab_heads.model.backends import evaluating
from collab_heads.registry import get_adapter
from collab_heads.text import portable_name
from collab_heads.training.data.batches import chunked, longest_first
from collab_heads.training.data.collate import Collate, generate, tokenize
from collab_heads.training.data.parallel import read_lines, read_two, without_empty
from collab_heads.training.flags.parsing import Parser, count, count_from_1, path
from collab_heads.training.runs.loading import load_or_explain


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Read the flags."""
    parser = Parser(prog="python -m collab_heads analyze", description=__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder, or name on the Hub, of the model")
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="text file with a sentence a line; for a translation model also the file of its translations",
    )
    add(
        "--treebank",
        metavar="FILE",
        help="CoNLL-U file in the input's language: the report also shows which heads follow its dependencies",
    )
    add(
        "--output_dir",
        type=path,
        default="head_report",
        metavar="DIR",
        help="folder for the report; must be new or empty",
    )
    add(
        "--parts",
        nargs="+",
        metavar="PART",
        help=f"parts of the report, some of {', '.join(PARTS)} (default: all but {PARTS[-1]})",
    )
    add("--samples", type=count_from_1, metavar="N", help="use only the first N sentences (default: all)")
    add("--examples", type=count, default=1, metavar="N", help="sentences whose attention maps are drawn")
    add("--batch_size", type=count_from_1, default=32, metavar="N", help="sentences per batch")
    add(
        "--max_length",
        type=count_from_1,
        default=128,
        metavar="N",
        help="leave out sentences of more tokens (word pieces)",
    )
    add("--source_prefix", default="", metavar="TEXT", help="text before every input, as T5 wants it")
    add("--device", default="cpu", metavar="DEVICE", help="where the model runs, such as cuda")
    add("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> HeadReport:
    """Analyze, print and write; returns the report. All input is read before the model runs."""
    args = parse(argv)
    check_matplotlib()
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"--output_dir {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()):
        raise OutputError(f"--output_dir {folder} is in use: choose another, or move what is there")
    sentences = read_conllu(args.treebank) if args.treebank else None
    texts = read_data(args)
    model, tokenizer = load(args)
    args.max_length = min(args.max_length, longest_input(model, tokenizer) or args.max_length)
    report = analyze_heads(
        model,
        batches_of(args, model, tokenizer, fitting(args, tokenizer, texts)),
        parts=args.parts,
        tokenizer=tokenizer,
        treebank=sentences,
        num_examples=args.examples,
        data=", ".join(map(portable_name, args.data)),
    )
    print(report)
    print(f"report: {report.save(folder)}")
    return report


def read_data(args: Namespace) -> dict[str, list[str]]:
    """The sentences, as many as asked for, by "source" and, with two files, "target"; empty lines are left out."""
    if len(args.data) > 2:
        raise ArgumentError(f"--data has {len(args.data)} files: give one of text, or two that are translations")
    if len(args.data) == 2:
        texts, _ = without_empty(" and ".join(args.data), *read_two(*map(Path, args.data)))
    else:
        lines = read_lines(Path(args.data[0]))
        texts = {"source": [line for line in lines if line.strip()]}
        if missing := len(lines) - len(texts["source"]):
            print(f"{args.data[0]}: left out {missing} of {len(lines):,} lines, which are empty")
    return {side: lines[: args.samples] for side, lines in texts.items()}


def load(args: Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, of the class that its config names, and its tokenizer."""
    remote = {"trust_remote_code": args.trust_remote_code}
    config = load_or_explain(AutoConfig, args.model, **remote)
    named = getattr(transformers, (config.architectures or ["AutoModel"])[0], AutoModel)
    model = load_or_explain(named, args.model, dtype=torch.float32, **({} if named is not AutoModel else remote))
    get_adapter(model)
    if len(args.data) == 2 and not model.config.is_encoder_decoder:
        raise ArgumentError(f"--data has two files, and {type(model).__name__} takes one: it does not translate")
    try:
        return model.to(args.device), load_or_explain(AutoTokenizer, args.model, **remote)
    except RuntimeError as error:
        raise ArgumentError(f"--device {args.device}: {str(error).splitlines()[0]}") from error


def fitting(args: Namespace, tokenizer: PreTrainedTokenizerBase, texts: dict[str, list[str]]) -> dict[str, list[str]]:
    """The sentences, or pairs, that are not longer than `--max_length`; how many are left out is said."""
    lengths = [list(map(len, tokenizer([args.source_prefix + line for line in texts["source"]])["input_ids"]))]
    if "target" in texts:
        lengths.append(list(map(len, tokenizer(text_target=texts["target"])["input_ids"])))
    fits = [i for i, sides in enumerate(zip(*lengths, strict=True)) if max(sides) <= args.max_length]
    if not fits:
        raise ArgumentError(f"--max_length {args.max_length}: every sentence of {args.data[0]} is longer")
    if missing := len(texts["source"]) - len(fits):
        print(f"left out {missing} of {len(texts['source']):,} sentences of more than {args.max_length} tokens")
    return {side: [lines[i] for i in fits] for side, lines in texts.items()}


def batches_of(
    args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Mapping[str, list[str]]
) -> list[dict]:
    """Batches of sentences of like length; a translation model's with labels: the target, or what it makes itself."""
    if not model.config.is_encoder_decoder:
        encoded = tokenizer(texts["source"])
        groups = longest_first(list(map(len, encoded["input_ids"])), args.batch_size)
        rows = [{name: values[i] for name, values in encoded.items()} for i in range(len(texts["source"]))]
        return [dict(tokenizer.pad([rows[i] for i in group], return_tensors="pt")) for group in groups]
    if "target" not in texts:
        texts = {**texts, "target": translations(args, model, tokenizer, texts["source"])}
    pairs = tokenize(texts, tokenizer, args.source_prefix, args.max_length, args.max_length)
    collate = Collate(model, tokenizer.pad_token_id)
    groups = longest_first(list(map(len, pairs["input_ids"])), args.batch_size)
    return [collate([{name: rows[i] for name, rows in pairs.items()} for i in group]) for group in groups]


def translations(
    args: Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Sequence[str]
) -> list[str]:
    """What the model makes of the sentences, greedily."""
    translated: list[str] = []
    with evaluating(model):
        for batch in chunked(source, args.batch_size):
            texts = [args.source_prefix + line for line in batch]
            inputs = tokenizer(texts, padding=True, return_tensors="pt")
            ids = generate(model, inputs.to(model.device), num_beams=1, max_length=args.max_length)
            translated += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return translated
