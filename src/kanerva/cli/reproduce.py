"""`kanerva reproduce`: one table or figure of the paper, as a record and a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kanerva.cli.options import Parser, choose_device, get_data_root, require_at_least
from kanerva.errors import UserError

if TYPE_CHECKING:
    from kanerva.lab.experiments import Experiment, Lab


def make_parser(words: list[str]) -> Parser:
    parser = Parser(
        "Make one table or figure of the paper: trains or finds what it needs, writes a record and "
        "pictures, and sets the claim beside what was measured. Interrupted, it goes on there."
    )
    parser.add_option("name", type=str | None, nargs="?", help="one of --list, or all")
    parser.add_argument("--list", action="store_true", help="what there is, and what it costs")
    parser.add_argument("--quick", action="store_true", help="small, on glyphs: minutes on a CPU")
    parser.add_option("--preset", type=str | None, help="data of the full protocol")
    parser.add_option("--seed", type=int, default=0)
    parser.add_option("--out", type=str, default="reproduced", help="folder of what is made")
    parser.add_option("--runs", type=str, default="runs/reproduce", help="folder of its models")
    parser.add_option("--steps", type=int | None, help="train every model so long")
    parser.add_device_options()
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Make one, or list them."""
    require_at_least(options, 1, "steps")
    if options["name"] is None and not options["list"]:
        raise UserError("say which: kanerva reproduce NAME; kanerva reproduce --list shows them")
    if options["quick"] and options["preset"] not in (None, "glyphs"):
        raise UserError("--quick runs on glyphs: leave out --preset")
    from kanerva.lab.experiments import NAMES, experiment
    from kanerva.lab.harness import describe, perform
    from kanerva.provenance import command

    if options["list"]:
        print(list_experiments())
        return 0
    names = list(NAMES) if options["name"] == "all" else [str(options["name"])]
    for found in [experiment(name) for name in names]:
        for lab in make_labs(found, options):
            typed = command(["reproduce", *(found.name if w == "all" else w for w in words)])
            record = perform(found, lab, Path(options["out"]), typed)
            print(describe(found, record))
            for file in record["pictures"]:
                print(Path(options["out"]) / file)
            print()
    return 0


def make_labs(found: "Experiment", options: dict[str, Any]) -> "list[Lab]":
    """One for each data set the experiment is to run on."""
    from kanerva.lab.experiments import Lab

    presets = (options["preset"],) if options["preset"] else found.presets
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
    """What there is, where it stands in the paper, and what it costs."""
    from kanerva.evaluation.report import columns
    from kanerva.lab.experiments import NAMES, experiment

    rows = [["NAME", "paper", "--quick", "full", "on", "shows"]]
    for name in NAMES:
        found = experiment(name)
        on = ", ".join(found.presets)
        rows.append([name, found.paper, found.quick, found.full, on, found.shows])
    return columns(rows, left=len(rows[0]))
