"""Tab completion for shells. `eval "$(kanerva --completion)"` turns it on.

The shell function passes the typed words to `kanerva --complete`, which prints one candidate per
line. If there is none, the shell offers files.
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
NAMES = {"--model": [*MODEL_CONFIGS], "--preset": [*DATASETS]}  # flags whose type is any string
NAMED = ("train", "bench")  # verbs in which these flags take these names


def complete(verbs: Mapping[str, str], words: list[str]) -> list[str]:
    """Candidates for the last word, which is still being typed."""
    *before, typed = words or [""]
    if not before:
        candidates = [*verbs, "--help", "--version"]
    elif before[0] not in verbs:
        candidates = []
    else:
        candidates = follow(before[0], before[1:], typed)
    return [word for word in candidates if word.startswith(typed)]


def follow(verb: str, before: list[str], typed: str) -> list[str]:
    """Words that may follow those `before`: values of the last flag, flags, or values of the first
    positional."""
    last = before[-1] if before else ""
    parsed = before[:-1] if last.startswith("-") else before  # a last flag may lack its value yet
    try:
        module = import_module(f"kanerva.cli.{verb}")
        parser: Parser = module.make_parser(["--help", *parsed])  # with --help no preset is needed
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
    """The values of an option whose type lists them."""
    return [*list_choices(action.type.hint)] if isinstance(action.type, Converter) else []
