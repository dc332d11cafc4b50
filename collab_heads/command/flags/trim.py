r"""Trim the vocabulary of a model to the tokens that texts use: the tokenizer, the embeddings and the output layer.

    collab-heads trim sentence-transformers/all-MiniLM-L6-v2 --data text.txt --output_dir trimmed
    collab-heads trim Helsinki-NLP/opus-mt-de-en --data dev.de dev.en --keep 0.9 --output_dir trimmed

Texts of kept tokens give what they gave before. Special tokens, characters and bytes stay, so that nothing becomes
unknown; other words become shorter pieces. What is written loads without this package, unless the model was compressed.
"""

from argparse import ArgumentParser, Namespace

from collab_heads.command.flags.parsing import count_from_1, width
from collab_heads.command.flags.shared import (
    add_data_arguments,
    add_loading_arguments,
    add_model_argument,
    add_output_argument,
    add_prefix_argument,
    check_input,
    check_new_model,
)
from collab_heads.command.flags.signatures import option_adder


def add_arguments(parser: ArgumentParser) -> None:
    add_model_argument(parser)
    add_data_arguments(parser)
    add_output_argument(parser, "the trimmed model")
    add_option = option_adder(parser.add_argument, "vocabulary.trim", "trim_vocabulary")
    add_option(
        "keep", type=width, metavar="N", help="tokens that stay, or their share of the vocabulary; default: all used"
    )
    add_option("min_count", type=count_from_1, metavar="N", help="how often the texts must use a token")
    add_prefix_argument(parser)
    add_loading_arguments(parser)


def check(args: Namespace) -> None:
    """Check the model, the texts and the output folder.

    Raises:
        ArgumentError: if there is no such model, or the output folder is not given.
        DataError: if a text file is missing.
        OutputError: if the folder is not free.
    """
    check_new_model(args)
    check_input(args)
