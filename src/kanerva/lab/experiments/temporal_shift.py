"""§3.3: does the temporal shift help, and does it cost the exchangeability of episodes?"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.data.splits import fixed_episodes, load_split
from kanerva.evaluation.bound import chunks
from kanerva.evaluation.controls import holding
from kanerva.evaluation.report import columns
from kanerva.lab.experiments import sweep
from kanerva.lab.experiments.sweep import Setting
from kanerva.lab.harness import About, Figures, Finding, Lab
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
    moved, drawn = [], []
    for chunk in chunks(episodes, holding(episodes, sweep.IMAGES), None):
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
    change = torch.cat(moved).double()
    return {
        "order": float(change.abs().mean()),
        "order_mean": float(change.mean()),
        "resampling": float(torch.cat(drawn).double().abs().mean()),
        "n_images": len(change),
    }


def verdict(figures: Figures) -> str:
    """Whether the shift helps each model, and whether an episode's order matters to it."""
    gains, words = figures["gains"], []
    for model, found in gains.items():
        does = "helps" if found["nats"] > 0 else "HARMS"
        does = does if found["clear"] else "makes no clear difference to"
        words.append(f"it {does} {model} ({found['nats']:+.1f} ± {found['margin']:.1f} nats)")
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
    equal = sweep.equal_runs(lab, 400)
    chosen = sweep.seeds(lab)
    entries = {setting.label: sweep.train_and_score(equal, setting, chosen) for setting in SETTINGS}
    orders = {}
    for setting in SETTINGS:
        model = equal.trained(setting.model, setting.variant, seed=chosen[0], **setting.parts)
        orders[setting.label] = change_by_order(equal, model, setting)
    figures = {
        "paper_nats": SHIFT_GAIN,
        "entries": entries,
        "gains": {
            model: sweep.gap(entries[without]["bound"], entries[shifted]["bound"])
            for model, (without, shifted) in PAIRS.items()
        },
        "order": orders,
    }
    picture = sweep.draw_bounds(lab, list(entries.values()))
    return Finding(figures, table(figures), picture)


def table(figures: Figures) -> list[str]:
    entries, orders = list(figures["entries"].values()), figures["order"]
    shuffled = ["mean |change|, shuffled", "mean change", "mean |change| of a new draw of latents"]
    rows = [["", *shuffled]]
    for name, found in orders.items():
        both = [f"{found[what]:.4f}" for what in ("order", "order_mean")]
        rows.append([name, *both, f"{found['resampling']:.2f}"])
    return [
        *sweep.rows(entries),
        *sweep.gap_lines(figures["gains"], "the shift gains"),
        "",
        *columns(rows, left=1).splitlines(),
        f"nats per image, {orders['dkm']['n_images']} images, seed {entries[0]['seeds'][0]}; "
        "an episode shuffled: all latents at their means; dkm: KL(M) unpaid",
    ]


ABOUT = About(
    paper="§3.3",
    shows="with and without the shift; does an episode's order matter",
    claim="A temporal shift in the encoder improves Kanerva++ and DKM (the latter by "
    f"{SHIFT_GAIN} nats per image on "
    "Omniglot); episodes are exchangeable, their order does not matter.",
    full="2 h on a GPU",
    presets=("omniglot",),
)
