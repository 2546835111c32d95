"""`gguf-bridge completion`: a script that completes commands, options and choices in a shell.

It has them all in itself, so that no Python is started while somebody types. zsh reads bash's.
"""

import argparse
import shlex
from typing import Any

from bridge.cli.commands import COMMANDS
from bridge.cli.options import command
from bridge.cli.program import command_parsers

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_gguf_bridge() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" asked="${{COMP_WORDS[1]}}" known=""
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    known="{commands}"
  else
    case "$asked $before" in
{choices}
    *) if [[ $word == -* ]]; then
        case "$asked" in
{options}
        esac
      fi ;;
    esac
  fi
  if [[ -n $known ]]; then
    COMPREPLY=( $(compgen -W "$known" -- "$word") )
  fi
}}
complete -o bashdefault -o default -F _gguf_bridge gguf-bridge
"""


def add_parser(commands: Any) -> None:
    p = command(commands, "completion", run)
    p.add_argument(
        "shell", choices=SHELLS,
        help='bash or zsh: put eval "$(gguf-bridge completion SHELL)" into ~/.bashrc or ~/.zshrc; fish: write the '
        "output to ~/.config/fish/completions/gguf-bridge.fish",
    )  # fmt: skip


def run(a: argparse.Namespace) -> int:
    parsers = command_parsers()
    print(_fish(parsers) if a.shell == "fish" else _bash(parsers, a.shell), end="")
    return 0


def _words(action: argparse.Action) -> list[str]:
    """What may stand after an option: its choices, or the types that --type takes."""
    if "--type" in action.option_strings:
        from bridge.conversion.planning.recipe import TYPE_NAMES

        return TYPE_NAMES
    return [str(choice) for choice in action.choices or ()]


def _bash(parsers: dict[str, argparse.ArgumentParser], shell: str) -> str:
    choices, options = [], []
    for name, parser in parsers.items():
        flags = [flag for action in parser._actions for flag in action.option_strings]
        options.append(f'        {name}) known="{" ".join(flags)}" ;;')
        for action in parser._actions:
            if words := _words(action):
                patterns = [f'"{name} {flag}"' for flag in action.option_strings] or [f'"{name} {name}"']
                choices.append(f'    {"|".join(patterns)}) known="{" ".join(words)}" ;;')
    begin = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" if shell == "zsh" else ""
    filled = {"commands": " ".join(COMMANDS), "choices": "\n".join(choices), "options": "\n".join(options)}
    return begin + _BASH.format(**filled)


def _fish(parsers: dict[str, argparse.ArgumentParser]) -> str:
    lines = []
    for name, (_, help) in COMMANDS.items():
        lines.append(f"complete -c gguf-bridge -n __fish_use_subcommand -fa {name} -d {shlex.quote(help)}")
    for name, parser in parsers.items():
        seen = f"complete -c gguf-bridge -n '__fish_seen_subcommand_from {name}'"
        for action in parser._actions:
            words, help = _words(action), (action.help or "").split(";")[0].split("(")[0].strip().replace("%%", "%")
            spelled = [f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in action.option_strings]
            takes = f" -xa {shlex.quote(' '.join(words))}" if words else " -r" if action.nargs != 0 else ""
            if spelled:
                lines.append(f"{seen} {' '.join(spelled)}{takes} -d {shlex.quote(help)}")
            elif words:
                lines.append(f"{seen} -fa {shlex.quote(' '.join(words))}")
    return "\n".join(lines) + "\n"
