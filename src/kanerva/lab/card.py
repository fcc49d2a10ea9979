"""A shipped model's card: its record and its config as a page. Nothing in it is typed by hand."""

from typing import Any

from kanerva.config import KppConfig, RunConfig
from kanerva.data import info
from kanerva.evaluation.report import table

PIXELS = {
    "sample": "0 or 1, drawn from their grey: once for the test split, each epoch for training",
    "threshold": "0 or 1, cut at half grey",
    "dither": "0 or 1, dithered",
    "none": "8 bit",
}


def card(record: dict[str, Any], config: RunConfig) -> str:
    """The record that `ship` made, and the run's config, in words."""
    bound, memory, shipped = record["bound"], record["memory"], record["shipped"]
    name, trained = shipped["name"], shipped["trained"]
    variant = f", variant `{record['variant']}`" if record["variant"] else ""
    parts = [
        f"# {name}",
        f'`kanerva.load("{name}")`: `{record["model"]}`{variant}, {record["params"]:,} parameters, '
        f"stored as {shipped['dtype']} ({shipped['bytes'] / 1e6:.2f} MB) and float32 once loaded. "
        "This page is made from `evaluation.json` and `config.yaml` beside it.",
        "## Figure",
        f"**{bound['nll_nats']:.2f} ± {bound['ci95']:.2f} nats per image** (95 % interval over "
        "images), a bound on −ln p(x|M), scored with the weights as they ship; before they were "
        f"rounded to {shipped['dtype']} {shipped['unrounded_nll_nats']:.2f}. "
        f"`kanerva evaluate {name}` makes it again.",
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
    """What to expect no more of, as far as it was measured."""
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
            "It gives back what was written rather than making new images: for those train "
            "`--variant generate`."
        )
    return [
        *limits,
        f"One training, seed {record['seed']}: the interval is over images, not over trainings.",
        f"Nothing was measured on other data than `{record['data']}`.",
    ]
