"""The command line. Each verb is a module here: `make_parser(words)` and `run(options, words)`.

A verb imports torch only when it runs, so help and usage errors are quick. A user's mistake is
reported in one line. Exit codes: 0 done; 2 bad input or environment; 3 training met non-finite
numbers, the last good checkpoint is kept; 130 and 143 stopped by Ctrl-C and SIGTERM after saving.
"""

import os
import sys
import time
import warnings
from argparse import ArgumentError
from importlib import import_module
from typing import Any

import kanerva
from kanerva.cli.options import Parser, describe_argument_error, spell_flag
from kanerva.errors import NumbersWentBad, UserError, printable, suggest
from kanerva.processor import keep_memory

WAIT = 10.0  # seconds; torchrun stops all processes as soon as one has failed

VERBS = {
    "train": "train a model, or --resume a run",
    "evaluate": "score a run: the bound, its terms and controls; writes evaluation.json",
    "generate": "sample pictures from a memory",
    "recall": "write images, read them back from noisy or partial cues",
    "denoise": "denoise images by reading: three kinds of noise, the error after each step",
    "memory": "draw a memory, and the images written at their places",
    "store": "keep images in one file, find them from damaged pieces, forget them",
    "explore": "see a memory live in the browser: write, damage, find, forget, dream",
    "compare": "evaluation records side by side",
    "reproduce": "one table or figure of the paper, as a record and a picture",
    "bench": "measure speed: images/s, agreement of the forms, time to a bound, latency",
    "data": "list the data sets, or download one",
}
HEAVY = ("train", "evaluate", "reproduce", "bench")  # verbs that compute for minutes or more
EPILOG = """Tab completion in bash and zsh: put eval "$(kanerva --completion)" into your shell's
start file, ~/.bashrc or ~/.zshrc."""
EXTRAS = {  # packages that not every installation has
    "fastapi": "the page needs fastapi: pip install 'kanerva[explore]'",
    "uvicorn": "the page needs uvicorn: pip install 'kanerva[explore]'",
    "faiss": "a store of more than 50,000 images needs faiss: pip install 'kanerva[store]'",
    "tensorboard": "--logger tensorboard needs tensorboard: pip install 'kanerva[tensorboard]'",
    "wandb": "--logger wandb needs wandb: pip install 'kanerva[wandb]'",
    "lightning_fabric": "training needs lightning-fabric: pip install 'kanerva[train]'",
}


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    words = [spell_flag(word) for word in (sys.argv[1:] if argv is None else argv)]
    warnings.showwarning = print_warning
    try:
        return run_verb(words)
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    except UserError as error:
        return complain(error, 2)
    except ArgumentError as error:
        return complain(describe_argument_error(error, str(error)), 2)
    except NumbersWentBad as error:
        return complain(error, 3)
    except (MemoryError, RuntimeError) as error:
        full = any(words in str(error) for words in ("alloc", "out of memory"))
        if not full and not isinstance(error, MemoryError):
            raise
        advice = "not enough memory; use smaller sizes or a smaller batch"
        return complain(f"{advice}: {error}".removesuffix(": "), 2)  # Python's own has no text
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return complain(EXTRAS[error.name], 2)
    except BrokenPipeError:  # nobody reads our output any more, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return complain(f"{error.filename}: {error.strerror or error}", 2)
    except KeyboardInterrupt:
        return complain("stopped", 130)


def run_verb(words: list[str]) -> int:
    """Parse the command line and run its verb."""
    words = words[1:] if words[:1] == ["--"] else words  # torchrun -m kanerva -- VERB
    words = ["--help"] if words[:1] == ["help"] else words
    if words[:1] in (["--completion"], ["--complete"]):
        return print_completion(words)
    verb = words[0] if words else ""
    if verb and verb not in VERBS and not verb.startswith("-"):
        hint = suggest(verb, VERBS)
        raise UserError(f"unknown verb {verb!r}; {hint}there are {', '.join(VERBS)}")
    module = import_module(f"kanerva.cli.{verb}") if verb in VERBS else None
    parser = Parser(prog="kanerva")
    parser.epilog = EPILOG
    parser.add_argument("--version", action="version", version=kanerva.__version__)
    verbs = parser.add_subcommands(
        dest="verb", required=False, metavar="VERB", description="kanerva VERB --help says more."
    )
    subparsers = {name: Parser() for name in VERBS}
    if module is not None:  # the other verbs' options are not needed
        subparsers[verb] = module.make_parser(words[1:])
    for name, text in VERBS.items():
        verbs.add_subcommand(name, subparsers[name], help=text).prog = f"kanerva {name}"
    if module is None:
        parser.check_flags(words)
        parser.parse_args(words)
        parser.print_help()  # there was no verb at all
        return 2
    subparsers[verb].check_flags(words[1:])
    if verb in HEAVY:
        keep_memory()
    options = parser.parse_args([verb, *subparsers[verb].words_first(words[1:])])
    return module.run(options[verb].as_dict(), words[1:])


def print_completion(words: list[str]) -> int:
    """With `--completion`, print the script that a shell evaluates. With `--complete WORDS`, which
    that script calls, print what may follow these words."""
    from kanerva.cli.completion import SCRIPT, complete

    turn_on = words[0] == "--completion"
    print(SCRIPT if turn_on else "\n".join(complete(VERBS, words[1:])), end="" if turn_on else None)
    return 0


def print_warning(
    message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any
) -> None:
    """Print a warning as one line. Deprecations and warnings of torch's compiler are dropped."""
    internal = issubclass(category, DeprecationWarning | FutureWarning) or "_inductor" in filename
    if not internal:
        print(f"kanerva: {printable(' '.join(str(message).split()))}", file=sys.stderr)


def complain(error: object, code: int) -> int:
    """Print one line on stderr. Under `torchrun` rank 0 prints at once. The others wait first; by
    then torchrun has usually stopped them, so the line appears once."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(WAIT)
    print(f"kanerva: {printable(' '.join(str(error).split()))[:500]}", file=sys.stderr)
    return code


def entry() -> None:
    """The console script."""
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # All is written. Shutting down a process group may abort, or wait for one that is gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
