"""The work of `collab-heads trim`."""

from argparse import Namespace

from collab_heads.command.inputs import check_class, load, read_data
from collab_heads.command.writing import write_model
from collab_heads.vocabulary.trim import VocabularyReport, trim_vocabulary


def run(args: Namespace) -> VocabularyReport:
    """Trim the vocabulary of a model, print and write the result, and return the report."""
    sides = read_data(args)
    sources = [args.source_prefix + line for line in sides["source"]]
    texts = list(zip(sources, sides["target"], strict=True)) if "target" in sides else sources
    loaded = load(args)
    check_class(loaded.model)
    report = trim_vocabulary(loaded.model, loaded.tokenizer, texts, keep=args.keep, min_count=args.min_count)
    print(report)
    write_model(args, loaded._replace(tokenizer=report.tokenizer), "trim", report)
    return report
