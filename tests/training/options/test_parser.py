"""The parser: what --help says, and which values name files."""

from argparse import ArgumentTypeError

import pytest

from collab_heads.command import main
from collab_heads.training.options.parser import Parser, count, input_paths, path, share_or_size, stored_value


@pytest.mark.parametrize("command", main.COMMANDS)
def test_every_flag_says_what_it_does_and_its_default(command):
    parser = main.parser(command)
    formatter = parser._get_formatter()
    for action in parser._actions:
        said = formatter._expand_help(action)
        assert len(said.split()) > 1, action.dest
        assert said.count("(default:") <= 1, said
        if action.option_strings and action.default not in (None, "", "==SUPPRESS==") and action.default is not False:
            assert said.endswith(f"(default: {action.default})"), said


def test_defaults_in_the_help():
    """Those that say something; one that the text says itself is not said again."""
    parser = Parser(prog="x")
    parser.add_argument("name", default="nothing", help="positional")
    parser.add_argument("--number", type=count, default=0, help="a number")
    parser.add_argument("--all", help="some (default: all)")
    parser.add_argument("--text", default="", help="a text")
    parser.add_argument("--on", action="store_true", help="a switch")
    ends = [line.split("  ")[-1].strip() for line in parser.format_help().splitlines()]
    assert ends[-4:] == ["a number (default: 0)", "some (default: all)", "a text", "a switch"]
    assert "positional" in ends


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
