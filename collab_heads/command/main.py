"""The command `collab-heads`: it finds the command, parses its flags, and sets the exit code.

All modules imported here are light: see `collab_heads.base.command_start`.
"""

import argparse
import io
import json
import os
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import Any

from collab_heads.base.checks import check_choice
from collab_heads.base.command_start import INTERRUPTED, change_handler, leave
from collab_heads.command.flags import COMMANDS
from collab_heads.command.places import reserving
from collab_heads.command.shared_flags import JSON, QUIET
from collab_heads.errors import ArgumentError, CollabHeadsError, LoadError
from collab_heads.training.options.parser import Parser

WORK = {  # command -> the module of its work; others: work.py
    "compress": "compressing",
    "shrink": "shrink",
    **dict.fromkeys(("export", "encode", "generate", "evaluate"), "serving"),
    **dict.fromkeys(("glue", "translate", "images"), "training"),
}
DONE, FAILED, WRONG_FLAGS = 0, 1, 2  # exit codes


def usage() -> str:
    """Return the text of `collab-heads --help`."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        (
            "usage: collab-heads COMMAND [FILE] ...",
            "",
            "Make pretrained Transformers smaller and faster, and their attention easier to understand.",
            "",
            "commands:",
            *(f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()),
            "",
            "  COMMAND --help               explain a command",
            "  COMMAND FILE ...             take flags from a .json or .yaml file; flags after it override them",
            "  COMMAND ... --json           print one JSON document, and messages on stderr",
            "  COMMAND ... --quiet          no progress bars",
            "  --version",
            f"  --print_completion SHELL     {', '.join(SHELLS)}: a script that completes commands and flags",
            "",
            "exit codes: 0 done, 1 it failed, 2 wrong flags, 130 interrupted",
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors are printed on stderr, and the exit code is returned."""

    def work() -> None:
        change_handler(leave, signal.default_int_handler)  # from here on Ctrl-C raises: the work may have to clean up
        name, args = read(sys.argv[1:] if argv is None else argv)
        if not args.json:
            run(name, args)
            return
        with redirect_stdout(sys.stderr):
            result = run(name, args)
        if int(os.environ.get("RANK", 0)) == 0:  # only the first of several processes prints
            print(json.dumps(as_document(result), indent=1))

    return exit_code(work) or DONE


def exit_code(work: Callable[[], object]) -> int | None:
    """Do the work and print errors on stderr; return the exit code if it did not end as it should, else None."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
        try:
            work()
        finally:
            sys.stdout.flush()  # also of what argparse prints before it exits
        return None
    except CollabHeadsError as problem:
        tell(in_words(problem))
        return WRONG_FLAGS if isinstance(problem, ArgumentError) and not isinstance(problem, LoadError) else FAILED
    except KeyboardInterrupt:
        tell("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        discard_output()
        return DONE
    except OSError as problem:  # of the output, such as a full disk
        tell(f"cannot write or read: {problem}")
        discard_output()
        return FAILED


def tell(message: str) -> None:
    """Print a message on stderr, if that can be written to."""
    with suppress(OSError):
        print(f"collab-heads: {message}", file=sys.stderr, flush=True)


def discard_output() -> None:
    """Send what is still buffered for stdout nowhere, so that Python does not try again when it ends."""
    with suppress(OSError, ValueError):  # ValueError: stdout is not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def in_words(problem: CollabHeadsError) -> str:
    """Return the message of an error, with commands and flags in place of the functions and arguments that it names."""
    said = re.sub(r"\b(prune|fold)_heads\b", r"collab-heads \1", str(problem))
    return re.sub(r"(?<![\w-])sites=", "--sites", said)


def look(argv: Sequence[str]) -> None:
    """Read and check the flags, and do nothing else; exit if they are wrong, or after printing help."""
    code = exit_code(lambda: read(argv))
    if code is not None:
        sys.exit(code)


def read(argv: Sequence[str]) -> tuple[str, Namespace]:
    """Return the name of the requested command and its flags, with all checks that need no model."""
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        answer(usage())
    if name == "--version":
        answer(f"collab-heads {import_module('collab_heads').__version__}")
    if name == "--print_completion":
        check_choice("--print_completion", rest[0] if rest else "", SHELLS)
        answer(completion(rest[0], {each: flags_of(parser(each)) for each in COMMANDS}))
    check_choice("command", name, COMMANDS)
    args = parser(name).parse_args(rest)
    COMMANDS[name].check(args)
    return name, args


def answer(text: str) -> None:
    """Print a text and exit."""
    print(text, flush=True)
    sys.exit(DONE)


def parser(name: str) -> Parser:
    """Build the parser of a command; `--json` and `--quiet` are added to all of them."""
    made = COMMANDS[name].parser(prog=f"collab-heads {name}")
    made.add(JSON, QUIET)
    return made


WORD = r"\w[\w.-]*"  # a value in the help of a flag, where values stand in a list, or each before what it means
LIST = re.compile(rf"(?:\b(?:one|some) of|:) ({WORD}(?:, {WORD})+)(?=$|[;,]| \()")
MEANINGS = re.compile(r"(?:^|; )([a-z][\w.-]*): ")


def flags_of(of: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Return the flags of a command, with the values that the help of each names."""
    return {
        flag: values_in(action.help or "")
        for action in of._actions
        for flag in action.option_strings
        if flag.startswith("--")
    }


def values_in(text: str) -> list[str]:
    """Return the values that the help of a flag names."""
    found, meanings = LIST.search(text), MEANINGS.findall(text)
    if found:
        return found[1].split(", ")
    return meanings if len(meanings) > 1 else []


def run(name: str, args: Namespace) -> Any:
    """Run a command and return its report."""
    quiet, _ = vars(args).pop("quiet"), vars(args).pop("json")  # flags of the output, not of the work
    with import_module("collab_heads.base.progress").showing_bars(not quiet), reserving(args):
        return getattr(import_module(f"collab_heads.command.{WORK.get(name, 'work')}"), f"run_{name}")(args)


def as_document(result: Any) -> Any:
    """Return a report in a form that JSON can hold."""
    return result.to_dict() if hasattr(result, "to_dict") else result


Flags = Mapping[str, Mapping[str, Sequence[str]]]  # command -> its flags -> values that they take


def bash(flags: Flags) -> str:
    """Return the script for bash: `eval "$(collab-heads --print_completion bash)"` in ~/.bashrc."""
    cases = "\n".join(f"        {name}) words='{' '.join(known)}' ;;" for name, known in flags.items())
    values = "\n".join(
        f"        '{name} {flag}') values='{' '.join(known)}' ;;"
        for name, each in flags.items()
        for flag, known in each.items()
        if known
    )
    return f"""_collab_heads() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words="" values="" last="" each
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '{" ".join(flags)} --help --version --print_completion' -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    for each in "${{COMP_WORDS[@]:2:COMP_CWORD-2}}"; do
        case "$each" in --*) last="$each" ;; esac
    done
    case "${{COMP_WORDS[1]}} $last" in
{values}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
        *) COMPREPLY=($(compgen -W "$values" -- "$word")) ;;
    esac
}}
complete -o default -F _collab_heads collab-heads"""


def zsh(flags: Flags) -> str:
    """Return the script for zsh, which runs bash's: `eval "$(collab-heads --print_completion zsh)"` in ~/.zshrc."""
    return f"autoload -Uz compinit bashcompinit && compinit && bashcompinit\n{bash(flags)}"


def fish(flags: Flags) -> str:
    """Return the script for fish: `collab-heads --print_completion fish | source` in ~/.config/fish/config.fish."""
    lines = [f"complete -c collab-heads -n __fish_use_subcommand -f -a '{' '.join(flags)}'"]
    lines += [
        f"complete -c collab-heads -n '__fish_seen_subcommand_from {name}' -l {flag.removeprefix('--')}"
        + (f" -x -a '{' '.join(values)}'" if values else "")
        for name, known in flags.items()
        for flag, values in known.items()
    ]
    return "\n".join(lines)


SHELLS: dict[str, Callable[[Flags], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def completion(shell: str, flags: Flags) -> str:
    return SHELLS[shell](flags)
