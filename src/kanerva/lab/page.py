"""A page for each experiment, written from its records: claim, command, picture, figures, verdict.

python -m kanerva.lab.page docs/experiments results/reproduce
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from kanerva.errors import UserError
from kanerva.lab.experiments import NAMES, experiment


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All records of experiments in a folder, full protocols before quick versions."""
    found = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if record.get("kind") != "reproduce":
            raise UserError(f"{path} is no record of kanerva reproduce")
        found.append(record)
    return sorted(found, key=lambda record: record["quick"])


def page(name: str, records: list[dict[str, Any]], pictures: str) -> str:
    """One experiment as Markdown; `pictures` is where they lie, seen from the page."""
    about = experiment(name)
    parts = [f"# {name}: {about.shows}", f"{about.paper}. {about.claim}"]
    if not records:
        parts.append("Not run yet.")
    for record in records:
        version = "Quick version" if record["quick"] else "Full protocol"
        images = [f"![{name}]({pictures}/{file})" for file in record["pictures"]]
        parts += [
            f"## {version}, {record['preset']}",
            f"`{record['command']}`: {record['wall_s']:.0f} s on {record['device']}"
            + (f", {found} models already trained" if (found := record["models_found"]) else ""),
            *images,
            "```text\n" + "\n".join(record["lines"]) + "\n```",
            f"**Verdict.** {record['verdict']}",
        ]
    return "\n\n".join(parts) + "\n"


def index(by_name: dict[str, list[dict[str, Any]]]) -> str:
    """What there is, and what each found."""
    lines = [
        "# The paper's experiments, and what goes beyond",
        "",
        "Each is one command, `kanerva reproduce NAME [--quick]`; the pages are written from its "
        "records by `make docs`.",
        "",
        "A verdict marked (quick) is of small models on drawn glyphs, trained for a minute or two, "
        "with one seed: it shows that the experiment works and what it looks like, and decides "
        "nothing about the paper's claim. The others name the data set of the full protocol.",
        "",
        "| experiment | paper | verdict |",
        "|---|---|---|",
    ]
    for name, records in by_name.items():
        best = records[0] if records else None
        version = "" if best is None else " (quick)" if best["quick"] else f" ({best['preset']})"
        said = "not run yet" if best is None else best["verdict"] + version
        lines.append(f"| [{name}]({name}.md) | {experiment(name).paper} | {said} |")
    return "\n".join(lines) + "\n"


def pages(folder: Path, results: Path) -> dict[Path, str]:
    """Every page and the index, by path."""
    records = read_records(results)
    by_name = {name: [r for r in records if r["name"] == name] for name in NAMES}
    seen = os.path.relpath(results, folder)
    found = {folder / f"{name}.md": page(name, own, seen) for name, own in by_name.items()}
    return found | {folder / "README.md": index(by_name)}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m kanerva.lab.page FOLDER RECORDS")
    for path, text in pages(Path(sys.argv[1]), Path(sys.argv[2])).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
