"""The parser: what --help says, and flags that need others."""

import pytest

from collab_heads.command import main
from collab_heads.errors import ArgumentError
from collab_heads.training.options.parser import Parser, flag, needing
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


@pytest.fixture
def parser():
    made = Parser(prog="x")
    made.add(
        flag("--price X", "a price", float),
        flag("--on", "a switch"),
        flag("--rate X", "a rate", float, 0.1, needs="price on"),
        *needing("on", flag("--names NAME...", "names"), flag("--all", "all of them")),
    )
    return made


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--rate 0.2", "^--rate needs --price or --on$"),
        ("--price 1 --names a b", "^--names needs --on$"),
        ("--price 1 --names a --all", "^--names, --all need --on$"),
    ),
)
def test_flags_that_need_others(flags, message, parser):
    with pytest.raises(ArgumentError, match=message):
        parser.parse_args(flags.split())


@pytest.mark.parametrize("flags", ("", "--rate 0.1", "--price 0 --rate 0.2", "--on --rate 0.2 --names a --all"))
def test_flags_that_have_what_they_need(flags, parser):
    """The default is no request, and 0 is a value."""
    parser.parse_args(flags.split())


def test_flags_of_a_file_need_others_too(parser, tmp_path):
    """The file replaces the defaults, which requests are compared with."""
    (tmp_path / "flags.json").write_text('{"rate": 0.3, "all": false}')
    with pytest.raises(ArgumentError, match=r"^--rate needs --price or --on$"):
        parser.parse_args([str(tmp_path / "flags.json")])
    assert parser.parse_args([str(tmp_path / "flags.json"), "--on"]).rate == 0.3
