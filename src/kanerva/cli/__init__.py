"""The command line. Each verb is a thin layer over the library; mistakes get one line, exit 2.

Exit codes: 0 done; 2 bad input or environment; 3 numbers went bad, last good checkpoint kept;
130 and 143 stopped by Ctrl-C and SIGTERM after saving.
"""

import importlib
import os
import re
import sys
import time
import warnings
from typing import Any

from jsonargparse import ArgumentError

import kanerva
from kanerva.cli.options import in_our_words
from kanerva.errors import NumbersWentBad, UserError

PATIENCE = 10.0  # seconds; torchrun ends all processes as soon as one has failed

VERBS = {  # verb: (module under kanerva.cli, what it does)
    "train": ("train", "train a model, or --resume a run"),
    "evaluate": ("evaluate", "the bound, its terms and controls; writes evaluation.json"),
    "generate": ("show", "random-key and key-perturbed pictures"),
    "recall": ("show", "write images, read them back from noisy or partial cues"),
    "denoise": ("show", "clean images by reading: three noises, ten steps, the error's curve"),
    "memory": ("show", "draw a memory, and what was written where it lies"),
    "compare": ("evaluate", "evaluation records side by side"),
    "reproduce": ("reproduce", "one table or figure of the paper, as record and picture"),
    "bench": ("bench", "images/s, time by part, share of the chip; agreement; time to a bound"),
    "data": ("data", "list the data sets, or fetch one"),
}


def usage() -> str:
    lines = ["usage: kanerva VERB [options]    (kanerva VERB --help)", ""]
    lines += [f"  {name:<10} {text}" for name, (_, text) in VERBS.items()]
    return "\n".join([*lines, "", "  --version"])


def warn(
    message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any
) -> None:
    """A warning as one line; not what libraries tell each other, or torch's compiler itself."""
    theirs = issubclass(category, DeprecationWarning | FutureWarning) or "_inductor" in filename
    if not theirs:
        print(f"kanerva: {' '.join(str(message).split())}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    warnings.showwarning = warn
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(usage())
            return 0 if argv else 2
        if argv[0] == "--version":
            print(kanerva.__version__)
            return 0
        if argv[0] not in VERBS:
            raise UserError(f"unknown verb {argv[0]!r}; there are {', '.join(VERBS)}")
        module = importlib.import_module(f"kanerva.cli.{VERBS[argv[0]][0]}")
        return getattr(module, argv[0])(argv[1:])
    except UserError as error:
        return complain(error, 2)
    except ArgumentError as error:
        return complain(in_our_words(str(error)), 2)
    except NumbersWentBad as error:
        return complain(error, 3)
    except (MemoryError, RuntimeError) as error:
        if not re.search("alloc|out of memory", str(error)):
            raise
        return complain(f"not enough memory; use smaller sizes or a smaller batch: {error}", 2)
    except PermissionError as error:
        return complain(f"{error.filename}: {error.strerror}", 2)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return complain("stopped", 130)


def complain(error: object, code: int) -> int:
    """One line on stderr, whatever the message. Of the processes of `torchrun` the first says it:
    the others wait, and speak only if it had nothing to say."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(PATIENCE)
    print(f"kanerva: {' '.join(str(error).split())[:500]}", file=sys.stderr)
    return code


def entry() -> None:
    """The console script."""
    code = main()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # All is written. Taking a group of processes apart may abort, or wait for one that is gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
