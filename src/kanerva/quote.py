"""Figures in prose come from records: rewrite the marked blocks of Markdown files.

A block stands between `<!-- table: results/a.json -->` (one record, as `kanerva evaluate` prints
it), `<!-- bench: results/bench/a.json -->` (as `kanerva bench`) or `<!-- compare: results/*/*.json
-->` (several, as `kanerva compare`; likewise `seeds`, `sizes`, `keys`, `samples`: report.py) and
`<!-- end -->`. Several patterns are joined by commas.

    python -m kanerva.quote README.md RESULTS.md
"""

import re
import sys
from pathlib import Path

from kanerva.benchmark.report import table as speed
from kanerva.benchmark.timing import read_measurement
from kanerva.errors import UserError
from kanerva.evaluation.record import read_record
from kanerva.evaluation.report import compare, keys, over_seeds, samples, sizes, table

TABLES = {"compare": compare, "seeds": over_seeds, "sizes": sizes, "keys": keys, "samples": samples}
OTHERS = ("bench", "reproduce")  # folders of records that are not evaluations
KINDS = "|".join(("table", "bench", *TABLES))
BLOCK = re.compile(rf"(<!-- ({KINDS}): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def quoted(text: str, root: Path) -> str:
    """The text with every marked block made anew from the records it names."""

    def fill(block: re.Match[str]) -> str:
        opening, kind, pattern, closing = block.groups()
        found = {part: sorted(root.glob(part)) for part in pattern.split(",")}
        for part, paths in found.items():
            if not paths:
                raise UserError(f"no record matches {part} under {root}")
        every = [path for paths in found.values() for path in paths]
        if kind == "bench":
            body = "\n\n".join(speed(read_measurement(path)) for path in every)
        else:
            records = [read_record(path) for path in every if path.parent.name not in OTHERS]
            body = table(records[0]) if kind == "table" else TABLES[kind](records)
        return f"{opening}```text\n{body}\n```\n{closing}"

    return BLOCK.sub(fill, text)


def main(files: list[str]) -> None:
    """Rewrite the files in place; patterns are relative to each file's folder."""
    for file in map(Path, files):
        file.write_text(quoted(file.read_text(), file.resolve().parent))


if __name__ == "__main__":
    main(sys.argv[1:])
