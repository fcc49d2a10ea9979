"""A page for each experiment, written from its records: claim, command, picture, figures, verdict.

python -m kanerva.lab.page docs/experiments results/reproduce
"""

import os
import sys
from pathlib import Path
from typing import Any

from kanerva.errors import UserError
from kanerva.lab.experiments import NAMES, experiment
from kanerva.plain_files import read_json, write_whole

HEAD = """\
# The paper's experiments, and what goes beyond

Each is one command, `kanerva reproduce NAME [--quick]`; the pages are written from its records by
`make docs`.

A verdict is of the full protocol, on the data set named first after it. Where it was run on others
too, the page has a verdict for each, and they may differ. A quick run has small models on drawn
glyphs, trained for a minute or two with one seed: it shows that the experiment works, and decides
nothing about the claim; what it measured is in its table.

| experiment | paper | verdict |
|---|---|---|
"""
RETIRED = "This record has kpp's variant generate, which is retired."


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Read all records of experiments in a folder."""
    records = []
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if not isinstance(record, dict) or record.get("kind") != "reproduce":
            raise UserError(f"{path} is not a record of kanerva reproduce")
        records.append(record)
    return records


def rank(records: list[dict[str, Any]], presets: tuple[str, ...]) -> list[dict[str, Any]]:
    """Sort records by importance: full protocols in the order of `presets`, then full protocols on
    other data, then the quick version; of each, the lowest seed first."""

    def place(record: dict[str, Any]) -> tuple[bool, int, int]:
        listed = record["preset"] in presets
        at = presets.index(record["preset"]) if listed else len(presets)
        return record["quick"], at, record["seed"]

    return sorted(records, key=place)


def page(name: str, records: list[dict[str, Any]], pictures: str) -> str:
    """One experiment as Markdown; `pictures` is the folder of pictures, relative to the page."""
    about = experiment(name)
    parts = [f"# {name}: {about.shows}", f"{about.paper}. {about.claim}"]
    if not records:
        parts.append("Not run yet.")
    for record in records:
        version = "Quick version" if record["quick"] else "Full protocol"
        images = [f"![{name}]({pictures}/{file})" for file in record["pictures"]]
        trained = record["models_found"]
        parts += [
            f"## {version}"
            + ("" if about.on_every_set else f", {record['preset']}")
            + (f", seed {record['seed']}" if record["seed"] else ""),
            f"`{record['command']}`: {record['wall_s']:.0f} s on {record['device']}"
            + (f", {trained} model{'s' if trained > 1 else ''} already trained" if trained else ""),
            *(
                [f"{RETIRED} Commit `{record['retired'][:7]}` ran it."]
                if is_retired(record)
                else []
            ),
            *images,
            "```text\n" + "\n".join(record["lines"]) + "\n```",
            f"**Verdict.** {about.conclusion(record)}",
        ]
    return "\n\n".join(parts) + "\n"


def is_retired(record: dict[str, Any]) -> bool:
    """Whether the record has figures of a model that no longer exists. Its field `retired` names
    the commit that ran it."""
    return "retired" in record


def index(by_name: dict[str, list[dict[str, Any]]]) -> str:
    """The index: all experiments, each with the verdict of its first record."""
    rows = [
        f"| [{name}]({name}.md) | {experiment(name).paper} | {conclude(name, records)} |\n"
        for name, records in by_name.items()
    ]
    return HEAD + "".join(rows)


def conclude(name: str, records: list[dict[str, Any]]) -> str:
    """The verdict of the first record, and the data sets of all full protocols."""
    if not records:
        return "not run yet"
    verdict = experiment(name).conclusion(records[0])
    if is_retired(records[0]):
        verdict += f" {RETIRED}"
    on = list(dict.fromkeys(record["preset"] for record in records if not record["quick"]))
    if not on or experiment(name).on_every_set:  # then the verdict names the data sets itself
        return verdict
    return f"{verdict} ({on[0]}{'; also on ' + ', '.join(on[1:]) if on[1:] else ''})"


def pages(folder: Path, results: Path) -> dict[Path, str]:
    """Every page and the index, by path."""
    records = read_records(results)
    by_name = {
        name: rank([r for r in records if r["name"] == name], experiment(name).presets)
        for name in NAMES
    }
    seen = os.path.relpath(results, folder)
    written = {folder / f"{name}.md": page(name, own, seen) for name, own in by_name.items()}
    return written | {folder / "README.md": index(by_name)}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m kanerva.lab.page FOLDER RECORDS")
    for path, text in pages(Path(sys.argv[1]), Path(sys.argv[2])).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
