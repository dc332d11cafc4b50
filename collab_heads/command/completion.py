"""Shell scripts that complete the commands, flags and file names of `collab-heads`."""

from collections.abc import Callable, Mapping, Sequence

Flags = Mapping[str, Sequence[str]]  # command -> its flags


def bash(flags: Flags) -> str:
    """Return the script for bash: `eval "$(collab-heads --print_completion bash)"` in ~/.bashrc."""
    cases = "\n".join(f"        {name}) words='{' '.join(known)}' ;;" for name, known in flags.items())
    return f"""_collab_heads() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '{" ".join(flags)} --help --version --print_completion' -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
        *) COMPREPLY=() ;;
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
        for name, known in flags.items()
        for flag in known
    ]
    return "\n".join(lines)


SHELLS: dict[str, Callable[[Flags], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def completion(shell: str, flags: Flags) -> str:
    """Return the completion script of a shell, one of `SHELLS`."""
    return SHELLS[shell](flags)
