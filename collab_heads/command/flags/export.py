r"""Write a model for the engine that serves it, run it there, and compare it with PyTorch.

    collab-heads export small --to onnx --output_dir served
    collab-heads export small --to onnx --int8 --output_dir served
    collab-heads export translator --to ctranslate2 --int8 --output_dir served

onnx is for ONNX Runtime, openvino for OpenVINO, ctranslate2 for CTranslate2; transformers is a checkpoint that loads
without this package, where the configuration of the family can say what the model is.
"""

from argparse import ArgumentParser, Namespace

from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import EXPORT_TARGETS
from collab_heads.command.flags.shared import (
    add_loading_arguments,
    add_model_argument,
    add_output_argument,
    check_input,
    check_new_model,
)
from collab_heads.command.flags.signatures import option_adder


def add_arguments(parser: ArgumentParser) -> None:
    add_model_argument(parser)
    add_output_argument(parser, "the exported model")
    add_option = option_adder(parser.add_argument, "serving.export", "export")
    add_option("to", metavar="TARGET", help=f"one of {', '.join(EXPORT_TARGETS)}")
    parser.add_argument(
        "--int8", action="store_true", help="store weights of matrix products in eight bits (not for transformers)"
    )
    add_loading_arguments(parser)


def check(args: Namespace) -> None:
    """Check the target, the model and the output folder.

    Raises:
        ArgumentError: if there is no such model or target, or the output folder is not given.
        OutputError: if the folder is not free.
    """
    check_choice("--to", args.to, EXPORT_TARGETS)
    check_new_model(args)
    check_input(args)
