"""Words that a shell may complete a command to: `eval "$(kanerva --completion)"` turns it on.

The shell's function passes what was typed to `kanerva --complete`, which prints one word a line;
where there is none, the shell offers files.
"""

from argparse import Action, ArgumentError
from collections.abc import Mapping
from importlib import import_module

from kanerva.cli.options import Converter, Parser, list_choices
from kanerva.config import MODEL_CONFIGS
from kanerva.data.registry import DATASETS
from kanerva.errors import UserError

SCRIPT = """\
[ -z "$ZSH_VERSION" ] || { autoload -U +X compinit && compinit; autoload -U +X bashcompinit && bashcompinit; }
_kanerva() {
    local IFS=$'\\n'
    COMPREPLY=($(kanerva --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _kanerva kanerva
"""  # noqa: E501
NAMES = {"--model": [*MODEL_CONFIGS], "--preset": [*DATASETS]}  # whose type is any word
NAMED = ("train", "bench")  # verbs in which those flags mean that


def complete(verbs: Mapping[str, str], words: list[str]) -> list[str]:
    """What the last of the words, still being typed, may become."""
    *before, typed = words or [""]
    if not before:
        found = [*verbs, "--help", "--version"]
    elif before[0] not in verbs:
        found = []
    else:
        found = follow(before[0], before[1:], typed)
    return [word for word in found if word.startswith(typed)]


def follow(verb: str, before: list[str], typed: str) -> list[str]:
    """Words that may follow those before: values of the last flag, flags, or what comes first."""
    last = before[-1] if before else ""
    whole = before[:-1] if last.startswith("-") else before  # its value may be what is being typed
    try:
        module = import_module(f"kanerva.cli.{verb}")
        parser: Parser = module.make_parser(["--help", *whole])  # --help: no preset is needed
    except (UserError, ArgumentError):
        return []
    for action in parser._actions:
        if last in action.option_strings and action.nargs != 0:
            return NAMES[last] if verb in NAMED and last in NAMES else choices_of(action)
    if typed.startswith("-"):
        return parser.flags
    places = [action for action in parser._actions if not action.option_strings]
    return choices_of(places[0]) if places and not before else []


def choices_of(action: Action) -> list[str]:
    """The values that an option's type names."""
    return [*list_choices(action.type.hint)] if isinstance(action.type, Converter) else []
