"""The types of flags' values: which of them name files, and what a budget may be."""

from argparse import ArgumentTypeError

import pytest

from collab_heads.training.options.parser import Parser
from collab_heads.training.options.value_types import input_paths, path, share_or_size, stored_value


def test_values_that_name_files():
    """Alone and in lists, but not the output folder; a record has them as text."""
    parser = Parser()
    parser.add_argument("--output_dir", type=path)
    parser.add_argument("--one", type=path)
    parser.add_argument("--some", type=path, nargs="+")
    parser.add_argument("--text")
    args = parser.parse_args("--output_dir out --one a --some b c --text d".split())
    assert input_paths(args) == ["a", "b", "c"]
    stored = stored_value([args.one, *args.some, args.text])
    assert [type(each) for each in stored] == [str] * 4


def test_a_budget_is_a_share_or_a_size():
    assert (share_or_size("0.5"), share_or_size("10MB")) == (0.5, "10MB")
    with pytest.raises(ArgumentTypeError, match=r"'50%' must be a size such as '10MB' .*, or a share such as 0\.5"):
        share_or_size("50%")
