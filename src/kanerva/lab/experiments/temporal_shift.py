"""§3.3: does the temporal shift help, and does it cost the exchangeability of episodes?"""

from typing import Any

import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from kanerva.data.splits import fixed_episodes, load_split
from kanerva.evaluation.bound import chunks
from kanerva.evaluation.controls import holding
from kanerva.lab.experiments.sweep import (
    IMAGES,
    Setting,
    bars,
    equal_runs,
    gap,
    rows,
    seeds,
    seeds_of,
    train_and_score,
    two_panels,
)
from kanerva.lab.harness import Experiment, Figures, Finding, Lab
from kanerva.lab.paper_figures import SHIFT_GAIN
from kanerva.models.base import MemoryModel
from kanerva.shapes import Episode

EXCHANGEABLE = 0.001  # nats: no more than rounding changes a bound by
PAIRS = {"kpp-paper": ("kpp-paper, no shift", "kpp-paper"), "dkm": ("dkm", "dkm-tsm")}
SETTINGS = (
    Setting("kpp-paper, no shift", "kpp-paper", parts={"encoder": {"shift": 0.0}}),
    Setting("kpp-paper", "kpp-paper"),
    Setting("dkm", "dkm"),
    Setting("dkm-tsm", "dkm-tsm"),
)


def reorder(images: Episode, generator: torch.Generator) -> tuple[Episode, Int[Tensor, "B T"]]:
    """Each episode in another order, and which image came where."""
    shape = images.shape[:2]
    order = torch.rand(shape, generator=generator, device=images.device).argsort(dim=1)
    return images[torch.arange(len(images), device=images.device)[:, None], order], order


def put_back(values: Float[Tensor, "B T"], order: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Undo an order: a value for each image where it was."""
    return torch.empty_like(values).scatter(1, order, values)


@torch.no_grad()
def change_by_order(lab: Lab, model: MemoryModel, setting: Setting) -> dict[str, Any]:
    """Nats by which an image's score changes when its episode is shuffled, everything at its mean,
    so that only the order differs; and between two draws of the latents in one order."""
    config = lab.config(setting.model, setting.variant, **setting.parts)
    episodes = fixed_episodes(config, load_split(config, "test", lab.data_root), lab.device)
    moved, mean, drawn = [], [], []
    for chunk in chunks(episodes, holding(episodes, IMAGES), None):
        images, counted = chunk.batch.images, chunk.batch.counted
        at_means = model.elbo(images, sample=False).nll_nats
        shuffled, order = reorder(images, lab.noise("order", chunk.start))
        after = put_back(model.elbo(shuffled, sample=False).nll_nats, order)
        draws = [
            model.elbo(images, generator=lab.noise("draw", number, chunk.start)).nll_nats
            for number in range(2)
        ]
        moved.append((after - at_means)[counted])
        drawn.append((draws[1] - draws[0])[counted])
        mean.append(at_means[counted])
    change = torch.cat(moved).double()
    return {
        "order": float(change.abs().mean()),
        "order_mean": float(change.mean()),
        "resampling": float(torch.cat(drawn).double().abs().mean()),
        "at_means": float(torch.cat(mean).double().mean()),
        "n_images": len(change),
    }


def verdict(figures: Figures) -> str:
    """Whether the shift helps each model, and whether an episode's order matters to it."""
    gains, words = figures["gains"], []
    for model, found in gains.items():
        amount = f"{found['nats']:+.1f} ± {found['margin']:.1f} nats"
        if not found["clear"]:
            words.append(f"it makes no clear difference to {model} ({amount})")
        else:
            does = "helps" if found["nats"] > 0 else "HARMS"
            it = "it" if "seeds" in found["over"] else "in this run it"
            words.append(f"{it} {does} {model} ({amount})")
    holds = all(found["clear"] and found["nats"] > 0 for found in gains.values())
    claim = "The shift helps both" if holds else "That the shift helps both does NOT show"
    over = next(iter(gains.values()))["over"]
    return (
        f"{claim}: {'; '.join(words)} ({over}; the paper: {SHIFT_GAIN} for DKM, Omniglot). "
        f"{judge_order(figures['order'])}"
    )


def judge_order(orders: dict[str, dict[str, Any]]) -> str:
    """To whom an episode's order matters."""
    free = [name for name, found in orders.items() if found["order"] < EXCHANGEABLE]
    bound = [
        f"{name} {found['order']:.2f} (two draws of its latents: {found['resampling']:.2f})"
        for name, found in orders.items()
        if found["order"] >= EXCHANGEABLE
    ]
    words = [f"Order does not matter to {', '.join(free)}."] if free else []
    if bound:
        words.append(
            f"NOT exchangeable, nats that an image changes by when shuffled: {'; '.join(bound)}."
        )
    return " ".join(words)


def run(lab: Lab) -> Finding:
    equal = equal_runs(lab, 400)
    chosen = seeds(lab)
    entries = {setting.label: train_and_score(equal, setting, chosen) for setting in SETTINGS}
    orders = {}
    for setting in SETTINGS:
        model = equal.trained(setting.model, setting.variant, seed=chosen[0], **setting.parts)
        orders[setting.label] = change_by_order(equal, model, setting)
    figures = {
        "paper_nats": SHIFT_GAIN,
        "entries": entries,
        "gains": {
            model: gap(entries[without]["bound"], entries[shifted]["bound"])
            for model, (without, shifted) in PAIRS.items()
        },
        "order": orders,
    }
    return Finding(figures, table(figures), {"": draw(lab, figures)})


def table(figures: Figures) -> list[str]:
    entries, orders = list(figures["entries"].values()), figures["order"]
    lines = rows(entries)
    for model, found in figures["gains"].items():
        lines.append(
            f"the shift gains {model} {found['nats']:.2f} ± {found['margin']:.2f} nats "
            f"({found['over']})"
        )
    lines += ["", f"{'an episode shuffled':<21}{'mean |change|':>15}{'mean change':>13}"]
    lines[-1] += f"{'mean |change| of a new draw of latents':>42}"
    for name, found in orders.items():
        lines.append(
            f"{name:<21}{found['order']:>15.4f}{found['order_mean']:>13.4f}"
            f"{found['resampling']:>42.2f}"
        )
    lines.append(
        f"nats per image, {orders['dkm']['n_images']} images, seed {entries[0]['seeds'][0]}; "
        "shuffled: all latents at their means; dkm: KL(M) unpaid"
    )
    return lines


def draw(lab: Lab, figures: Figures) -> Figure:
    entries, orders = list(figures["entries"].values()), figures["order"]
    first = entries[0]
    figure = two_panels(
        f"{lab.preset}, T={first['T']}, {first['steps']} steps of {first['images_per_step']} "
        "images each"
    )
    left, right = figure.axes
    bars(left, entries, "bound", f"test bound, {seeds_of(first)}")
    places = range(len(orders))
    for shift, key, label, colour in (
        (-0.2, "order", "its episode shuffled (latents at means)", "#1b6ca8"),
        (0.2, "resampling", "a new draw of the latents", "#b5b5b5"),
    ):
        heights = [found[key] for found in orders.values()]
        drawn = right.bar([p + shift for p in places], heights, 0.38, color=colour, label=label)
        right.bar_label(
            drawn,
            [f"{h:.3g}" if h >= EXCHANGEABLE else f"< {EXCHANGEABLE}" for h in heights],
            fontsize=8,
        )
    names = [name.replace(", ", ",\n") for name in orders]
    left.set_xticks(range(len(names)), names)
    right.set_xticks(list(places), names)
    right.margins(y=0.3)
    right.set_ylabel("nats that an image's score changes by")
    right.set_title("does order matter? mean |change|", fontsize=10)
    right.legend(fontsize=8, loc="upper left")
    return figure


EXPERIMENT = Experiment(
    name="temporal-shift",
    paper="§3.3",
    shows="with and without the shift; does an episode's order matter",
    claim="A temporal shift in the encoder improves Kanerva++ and DKM (the latter by "
    f"{SHIFT_GAIN} nats per image on "
    "Omniglot); episodes are exchangeable, their order does not matter.",
    run=run,
    verdict=verdict,
    full="2 h on a GPU",
    presets=("omniglot",),
)
