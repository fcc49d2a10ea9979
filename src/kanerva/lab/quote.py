"""Fill in figures from records: rewrite the marked blocks and values of Markdown files.

A block starts with a marker and ends with `<!-- end -->`. Several patterns are joined by commas.

    <!-- table: results/a.json -->           one record, as `kanerva evaluate` prints it
    <!-- bench: results/bench/a.json -->     as `kanerva bench` prints it
    <!-- compare: results/*/*.json -->       several, as `kanerva compare`; `seeds` with --seeds
    keys, samples, early, trust              tables of tables.py
    capacity                                 the table of capacity.py
    table1, headline                         the paper's figures beside ours

A value is part of a sentence: `<!-- value: mnist/kpp-store-s0 -->4.43<!-- end -->`. The name is a
record under `results/`; the value is its bound. A field after a colon selects another figure
(`:controls.left_out`, `:wall_s`, `:rows.0.ms_per_step`). If the name is a pattern
(`omniglot/vae-s?`), the value is the mean over records. Figures and plain numbers can be joined by
+ - * / between spaces; `as .1f` sets the format.

    python -m kanerva.lab.quote README.md RESULTS.md
"""

import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kanerva.errors import UserError
from kanerva.evaluation.records import read_record
from kanerva.evaluation.report import compare, over_seeds, table
from kanerva.lab import capacity
from kanerva.lab.benchmark.report import table as speed
from kanerva.lab.benchmark.timing import read_measurement
from kanerva.lab.experiments.table1 import collect_cells, format_cells, headline, judge_cells
from kanerva.lab.paper_figures import TABLE1
from kanerva.lab.tables import SETS, early, keys, samples, trust
from kanerva.plain_files import read_json, write_whole

TABLES: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "table": lambda records: table(records[0]),
    "compare": compare,
    "seeds": over_seeds,
    "keys": keys,
    "samples": samples,
    "early": early,
}
OTHERS = ("bench", "reproduce")  # folders of records that are not evaluations
KINDS = "|".join(("bench", "capacity", "trust", "table1", "headline", *TABLES))
BLOCK = re.compile(rf"(<!-- ({KINDS}): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: ([^<>]+?)(?: as (\S+))? -->)[^<>]*(<!-- end -->)")


def quoted(text: str, root: Path) -> str:
    """Return the text with every marked block and value rewritten from its records."""

    def fill(block: re.Match[str]) -> str:
        opening, kind, patterns, closing = block.groups()
        return f"{opening}{fill_block(kind, find_records(patterns.split(','), root))}\n{closing}"

    def print_value(value: re.Match[str]) -> str:
        opening, expression, form, closing = value.groups()
        return f"{opening}{evaluate_expression(expression, root):{form or '.2f'}}{closing}"

    return VALUE.sub(print_value, BLOCK.sub(fill, text))


def find_records(patterns: list[str], folder: Path) -> list[Path]:
    """The files that match the patterns; each pattern must match at least one."""
    every = {pattern: sorted(folder.glob(pattern)) for pattern in patterns}
    for pattern, paths in every.items():
        if not paths:
            raise UserError(f"no record matches {pattern} under {folder}")
    return [path for paths in every.values() for path in paths]


def fill_block(kind: str, paths: list[Path]) -> str:
    """The content of a block of that kind."""
    if kind == "bench":
        return fence("\n\n".join(speed(read_measurement(path)) for path in paths))
    if kind == "capacity":
        return fence(capacity.table(capacity.collect(paths)))
    if kind == "trust":
        return fence(trust(read_json(paths[0])))
    records = [read_record(path) for path in paths if path.parent.name not in OTHERS]
    if kind == "headline":  # without a blank line Markdown would join it to the comment
        return f"\n{headline(records)}\n"
    if kind == "table1":
        tested = [r for r in records if r["split"] == "test"]
        cells = collect_cells(tested, [name for name in SETS if name in TABLE1["kpp-paper"]])
        lines = format_cells(cells, trained_here=False)
        return f"{fence(chr(10).join(lines))}\n\n{judge_cells(cells)}\n"
    return fence(TABLES[kind](records))


def fence(text: str) -> str:
    """Wrap text in a code block."""
    return f"```text\n{text}\n```"


def evaluate_expression(expression: str, root: Path) -> float:
    """Evaluate a sum of products of figures and numbers, with spaces around + - * and /."""
    terms = re.split(r" ([+-]) ", expression)
    total = 0.0
    for sign, term in zip(["+", *terms[1::2]], terms[::2], strict=True):
        factors = re.split(r" ([*/]) ", term)
        product = 1.0
        for how, factor in zip(["*", *factors[1::2]], factors[::2], strict=True):
            number = look_up(factor.strip(), root)
            product = product * number if how == "*" else product / number
        total += product if sign == "+" else -product
    return total


def look_up(name: str, root: Path) -> float:
    """A plain number, or a field of a record; the mean if several records match."""
    if re.fullmatch(r"[\d.]+(e\d+)?", name):
        return float(name)
    pattern, _, field = name.partition(":")
    above = (folder / "results" for folder in (root, *root.resolve().parents))
    # the folder with records: docs/results has pages
    results = next((f for f in above if any(f.glob("*/*.json"))), root / "results")
    return statistics.fmean(
        read_field(path, field or "bound") for path in find_records([f"{pattern}.json"], results)
    )


def read_field(path: Path, field: str) -> float:
    """Read a number from a record. If the field is a score, read its nats."""
    value = read_json(path)
    for part in field.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise UserError(f"{path} has no figure {field}") from error
    value = value["nll_nats"] if isinstance(value, dict) and "nll_nats" in value else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{field} of {path} is not a number")
    return float(value)


def main(files: list[str]) -> None:
    """Rewrite the files in place; patterns are relative to each file's folder."""
    for file in map(Path, files):
        write_whole(file, quoted(file.read_text(), file.resolve().parent))


if __name__ == "__main__":
    main(sys.argv[1:])
