"""`kanerva compare`: evaluation records side by side."""

from typing import Any

from kanerva.cli.options import Parser, find_run


def make_parser(words: list[str]) -> Parser:
    parser = Parser("Print evaluation records side by side.")
    parser.add_option(
        "runs",
        type=str,
        nargs="+",
        help="run folders, records, folders of records, or names of shipped models",
    )
    parser.add_argument(
        "--over-seeds",
        action="store_true",
        help="mean and standard deviation over runs that differ only in their seed",
    )
    return parser


def run(options: dict[str, Any], words: list[str]) -> int:
    """Print the records, one line each."""
    from kanerva.evaluation.records import read_records
    from kanerva.evaluation.report import compare, over_seeds

    records = [record for run in options["runs"] for record in read_records(find_run(run))]
    print(over_seeds(records) if options["over_seeds"] else compare(records))
    return 0
