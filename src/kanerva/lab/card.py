"""A shipped model's card: a page made from its record and config; nothing is typed by hand.

    python -m kanerva.lab.card mnist > README.md

prints it for the Hub, with the metadata that the Hub reads on top. The argument is a shipped model,
or a folder that `kanerva.lab.ship` wrote.
"""

import math
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from kanerva.config import KppConfig, RunConfig
from kanerva.data import info
from kanerva.errors import UserError
from kanerva.evaluation.records import read_record
from kanerva.evaluation.report import table
from kanerva.models.loading import shipped_folder
from kanerva.runs import read_run_config

PIXELS = {
    "sample": "0 or 1, drawn from their grey: once for the test split, each epoch for training",
    "threshold": "0 or 1, cut at half grey",
    "dither": "0 or 1, dithered",
    "none": "8 bit",
}


def _unrounded(shipped: dict[str, Any]) -> str:
    if "unrounded_nll_nats" not in shipped:  # a model of bits
        return ""
    return f"; before they were rounded to {shipped['dtype']} {shipped['unrounded_nll_nats']:.2f}"


def card(record: dict[str, Any], config: RunConfig) -> str:
    """Write the card from the record that `ship` made and the run's config."""
    bound, memory, shipped = record["bound"], record["memory"], record["shipped"]
    name, trained = shipped["name"], shipped["trained"]
    total = bound["nll_nats"] + math.log(2) * memory["bits_per_image"]
    variant = f", variant `{record['variant']}`" if record["variant"] else ""
    parts = [
        f"# {name}",
        f'`kanerva.load("{name}")`: `{record["model"]}`{variant}, {record["params"]:,} parameters, '
        f"stored as {shipped['dtype']} ({shipped['bytes'] / 1e6:.2f} MB) and float32 once loaded. "
        "This page is made from `evaluation.json` and `config.yaml` beside it.",
        "## Figure",
        f"**{bound['nll_nats']:.2f} ± {bound['ci95']:.2f} nats per image** (95 % interval over "
        f"images), a bound on −ln p(x|M), scored with the weights as they ship"
        f"{_unrounded(shipped)}. `kanerva evaluate {name}` makes it again.",
        f"The memory takes **{memory['bits_per_image']:,.0f} bits per image**, which the bound "
        f"does not charge. With them an image costs {total:,.0f} nats, the sum.",
        f"```text\n{table(record)}\n```",
        "## Data",
        f"`{record['data']}`: {info(record['data']).description}. Images are "
        f"{'×'.join(map(str, record['image']))}; pixels are {PIXELS[record['binarization']]}. "
        f"The pixels scored have SHA-256 `{record['split_hash'][:16]}`.",
        "## Protocol",
        f"All {record['n_images']} images of the {record['split']} split, in "
        f"{record['n_episodes']} episodes of {record['T']}; one sample of each latent, both KL "
        "terms in full, p seeing an episode through its memory only: "
        f"{'×'.join(map(str, memory['shape']))} numbers ({memory['dtype']}), "
        f"{memory['floats_per_image']:g} floats or {memory['bits_per_image']:g} bits for each "
        f"image, not charged. Scored on {record['device']}, commit `{record['commit']}`.",
        "## Training",
        f"{record['steps']} steps, {record['images_seen']:,} images, "
        f"{record['wall_s'] / 60:.0f} minutes on {trained['device']}; the weights are those of "
        f"step {record['best_step']}, best on validation. Seed {record['seed']}, commit "
        f"`{trained['commit']}`, torch {trained['versions']['torch']}. "
        "`kanerva train --config config.yaml` trains it again.",
        "## Limits",
        "\n".join(f"- {limit}" for limit in _limits(record, config)),
    ]
    return "\n\n".join(parts) + "\n"


def _limits(record: dict[str, Any], config: RunConfig) -> list[str]:
    """The model's limits, as far as they were measured."""
    limits, unheld = [], record["controls"].get("left_out")
    if isinstance(config.model, KppConfig):
        limits.append(
            f"A memory holds at most {config.model.memory.capacity} images; it was trained and "
            f"scored with {record['T']} at a time."
        )
    if unheld is not None:
        limits.append(
            f"The figure is of images that were written. One that was not costs "
            f"{unheld['nll_nats']:.2f} nats (`left_out`, {record['controls']['n_images']} images)."
        )
    if record["variant"] == "store":
        limits.append(
            "It gives back what was written rather than making new images: `kpp-bits` makes those, "
            "of binary pixels."
        )
    return [
        *limits,
        f"One training, seed {record['seed']}: the interval is over images, not over trainings.",
        f"Nothing was measured on other data than `{record['data']}`.",
    ]


def hub_card(record: dict[str, Any], config: RunConfig) -> str:
    """The card as a Hub repository's README.md."""
    bound = EvalResult(
        task_type="unconditional-image-generation",
        dataset_type=record["data"],
        dataset_name=record["data"],
        dataset_split=record["split"],
        metric_type="nll_nats",
        metric_name="upper bound on -ln p(x | memory), nats per image",
        metric_value=round(record["bound"]["nll_nats"], 4),
    )
    fields = ModelCardData(
        model_name=record["shipped"]["name"],
        library_name="kanerva",
        license="apache-2.0",
        tags=["memory", record["model"]],
        eval_results=[bound],
    )
    return f"---\n{fields.to_yaml()}\n---\n\n{card(record, config)}"


def main(words: list[str]) -> int:
    """Print the card of the named model. A user's error is reported in one line."""
    try:
        if len(words) != 1:
            raise UserError("name one shipped model, or a folder that kanerva.lab.ship wrote")
        folder = shipped_folder(words[0]) or Path(words[0])
        record = read_record(folder)
        if "shipped" not in record:
            raise UserError(
                f"{folder} is not a shipped model: `python -m kanerva.lab.ship` makes one"
            )
        print(hub_card(record, read_run_config(folder)), end="")
    except UserError as error:
        print(f"kanerva: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
