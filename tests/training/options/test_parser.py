"""The parser: what --help says."""

import pytest

from collab_heads.command import main
from collab_heads.training.options.parser import Parser
from collab_heads.training.options.value_types import count


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
