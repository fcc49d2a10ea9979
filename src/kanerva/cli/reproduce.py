"""`kanerva reproduce`: one table or figure of the paper, as a record and a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kanerva.cli.options import Parser, choose_device, get_data_root, require_at_least
from kanerva.errors import UserError

if TYPE_CHECKING:
    from kanerva.lab.experiments import Experiment, Lab


def make_parser(words: list[str]) -> Parser:
    parser = Parser(
        "Reproduce one table or figure of the paper. Trains the models it needs or finds them, "
        "writes a record and pictures, and compares the paper's claim with what was measured. "
        "After an interruption, run the same command: it continues where it stopped."
    )
    parser.add_option("name", type=str | None, nargs="?", help="a name that --list shows, or all")
    parser.add_argument(
        "--list", action="store_true", help="list the names, and how long each takes"
    )
    parser.add_argument("--quick", action="store_true", help="small, on glyphs: minutes on a CPU")
    parser.add_option("--preset", type=str | None, help="data set of the full protocol")
    parser.add_option("--seed", type=int, default=0)
    parser.add_option(
        "--out", type=str, default="reproduced", help="folder for records and pictures"
    )
    parser.add_option("--runs", type=str, default="runs/reproduce", help="folder for its models")
    parser.add_option("--steps", type=int | None, help="training steps of every model")
    parser.add_device_options()
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Run experiments, or list them."""
    require_at_least(options, 1, "steps")
    if options["name"] is None and not options["list"]:
        raise UserError("name one: kanerva reproduce NAME; kanerva reproduce --list shows them")
    if options["quick"] and options["preset"] not in (None, "glyphs"):
        raise UserError("--quick runs on glyphs: leave out --preset")
    from kanerva.evaluation.records import make_folder
    from kanerva.lab.experiments import NAMES, experiment
    from kanerva.lab.harness import describe, perform
    from kanerva.provenance import command

    if options["list"]:
        print(list_experiments())
        return 0
    names = list(NAMES) if options["name"] == "all" else [str(options["name"])]
    experiments = [experiment(name) for name in names]
    make_folder(Path(options["out"]))
    for chosen in experiments:
        for lab in make_labs(chosen, options):
            typed = command(["reproduce", *(chosen.name if w == "all" else w for w in words)])
            record = perform(chosen, lab, Path(options["out"]), typed)
            print(describe(chosen, record))
            for file in record["pictures"]:
                print(Path(options["out"]) / file)
            print()
    return 0


def make_labs(chosen: "Experiment", options: dict[str, Any]) -> "list[Lab]":
    """Make a lab for each data set that the experiment runs on."""
    from kanerva.lab.experiments import Lab

    presets = (options["preset"],) if options["preset"] else chosen.presets
    return [
        Lab(
            quick=options["quick"],
            preset=name,
            runs=Path(options["runs"]),
            seed=options["seed"],
            device=choose_device(options),
            data_root=get_data_root(options),
            steps=options["steps"],
        )
        for name in (("glyphs",) if options["quick"] else presets)
    ]


def list_experiments() -> str:
    """A table of experiments: name, place in the paper, time they take, and what they show."""
    from kanerva.evaluation.report import columns
    from kanerva.lab.experiments import NAMES, experiment

    rows = [["NAME", "paper", "--quick", "full", "on", "shows"]]
    for name in NAMES:
        each = experiment(name)
        on = ", ".join(each.presets)
        rows.append([name, each.paper, each.quick, each.full, on, each.shows])
    return columns(rows, left=len(rows[0]))
