"""The nearest of known names, in messages."""

import pytest

from collab_heads.base.checks import did_you_mean
from collab_heads.base.option_values import EXPORT_TARGETS


@pytest.mark.parametrize(
    "name, known, said",
    (
        ("tensorrt", EXPORT_TARGETS, ""),  # "transformers" shares most of its letters, and is no engine
        ("onn", EXPORT_TARGETS, " (did you mean 'onnx'?)"),
        ("--modl", ("--demo", "--model_name_or_path", "--max_length"), " (did you mean '--model_name_or_path'?)"),
        ("--budgt", ("--budget", "--of"), " (did you mean '--budget'?)"),
        ("x", ("xlnet", "onnx"), ""),
    ),
)
def test_the_nearest_name_or_beginning_is_suggested(name, known, said):
    assert did_you_mean(name, known) == said
