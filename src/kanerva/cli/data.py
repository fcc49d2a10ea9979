"""`kanerva data`: list the data sets, and download them."""

from typing import Any, Literal

from kanerva.cli.options import Parser, get_data_root
from kanerva.errors import UserError


def make_parser(words: list[str]) -> Parser:
    parser = Parser("List the data sets, or download one.")
    parser.add_option("action", type=Literal["list", "fetch"])
    parser.add_option("name", type=str | None, nargs="?", default=None)
    parser.add_option("--data-root", type=str | None, help="folder of the data sets")
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """List the data sets, or download one."""
    if options["action"] == "fetch" and options["name"] is None:
        raise UserError("name a data set: kanerva data fetch NAME (see `kanerva data list`)")
    from kanerva import data

    root = get_data_root(options)
    if options["action"] == "fetch":
        for path in data.fetch(options["name"], root):
            print(path)
        return 0
    print(f"data root: {data.data_root(root)}")
    for name, info in data.DATASETS.items():
        state = "here" if data.is_present(name, root) else "not here"
        state = f"--data.{info.needs}" if info.needs else state
        print(f"{name:<14}{state:<14}{info.description}")
    return 0
