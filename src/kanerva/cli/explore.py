"""`kanerva explore`: a memory in the browser, served from this machine."""

from typing import Any

from kanerva.cli.options import Parser, get_data_root
from kanerva.errors import UserError


def make_parser(words: list[str]) -> Parser:
    parser = Parser("See a memory live in the browser: write, damage, find, forget, dream.")
    parser.add_option(
        "target",
        type=str | None,
        nargs="?",
        default=None,
        help="a shipped model's name, a run folder, or a store's file; default: mnist if its data "
        "is on this machine, else glyphs",
    )
    parser.add_option("--host", type=str, default="127.0.0.1", help="address to listen on")
    parser.add_option("--port", type=int, default=7410, help="port to listen on; 0: any free one")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_option("--data-root", type=str | None, help="folder of the data sets")
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Serve until Ctrl-C."""
    from kanerva import data
    from kanerva.explore.server import serve

    if not 0 <= options["port"] <= 65535:
        raise UserError(f"--port is a number up to 65535, got {options['port']}")
    root = get_data_root(options)
    target = options["target"] or ("mnist" if data.is_present("mnist", root) else "glyphs")
    serve(target, options["host"], options["port"], not options["no_open"], root)
    return 0
