"""`kanerva data`: which sets there are, and how they get here."""

from typing import Literal

from kanerva import data as sets
from kanerva.cli.options import Parser, root_of
from kanerva.errors import UserError


def data(argv: list[str]) -> int:
    """List the data sets, or download one."""
    parser = Parser("data", "List the data sets, or download one.")
    parser.add_argument("action", type=Literal["list", "fetch"])
    parser.add_argument("name", type=str | None, nargs="?", default=None)
    parser.add_argument("--data_root", type=str | None, help="where data sets lie")
    options = parser.read(argv)
    root = root_of(options)
    if options["action"] == "fetch":
        if options["name"] is None:
            raise UserError("say which: kanerva data fetch NAME (see `kanerva data list`)")
        for path in sets.fetch(options["name"], root):
            print(path)
        return 0
    print(f"data root: {sets.data_root(root)}")
    for name, info in sets.DATASETS.items():
        state = "here" if sets.is_present(name, root) else "not here"
        state = f"--data.{info.needs}" if info.needs else state
        print(f"{name:<14}{state:<14}{info.description}")
    return 0
