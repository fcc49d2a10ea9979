"""Beyond the paper: what drawings of a character tell of another drawing of it.

Some drawings of one character are written, and one that was not is scored under that memory, and
under memories of as many drawings of another character. The models never saw such episodes: they
were trained on mixed ones. The references train on sets of one character, so theirs is another
task: SCHA-VAE (Giannone and Winther 2022), Neural Statistician (Edwards and Storkey 2017).
"""

from typing import Any

import torch
from jaxtyping import Float, Float64
from matplotlib.figure import Figure
from torch import Tensor

from kanerva import data
from kanerva.data.splits import load_split
from kanerva.errors import UserError
from kanerva.evaluation.report import columns
from kanerva.lab.experiments import plots
from kanerva.lab.experiments.measures import Estimate, estimate
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.models.base import MemoryModel
from kanerva.presets import preset
from kanerva.seeding import stream

Drawings = Float[Tensor, "N drawings C H W"]  # by character
PerCharacter = Float64[Tensor, " N"]

WRITTEN = (1, 2, 4, 8, 11, 19)  # drawings of a character, as far as it has one more
MOST = 20  # drawings of a character that are used
COMPANY = 8  # images that are scored together: q is used to neighbours of all kinds
AT_ONCE = 32  # characters scored together
MODELS = {  # label: model and variant
    "kpp generate": ("kpp", "generate"),
    "kpp store": ("kpp", None),
    "kpp-paper": ("kpp-paper", None),
    "dkm": ("dkm", None),
    "no-memory": ("no-memory", None),
    "vae": ("vae", None),
}
OFF = 1000  # nats: far beyond anything a model says of what it knows
SCORES = {"own": "own", "gain": "gain", "over_empty": "over"}  # what the table calls them


def characters(lab: Lab, count: int | None) -> Drawings:
    """Test characters that have as many drawings as any, 20 at most; one draw of their pixels."""
    config = preset(lab.preset)
    found = load_split(config, "test", lab.data_root)
    if found.labels is None:
        raise UserError(f"{lab.preset} says of no image what it shows: few-shot needs labels")
    labels, counts = found.labels.unique(return_counts=True)
    each = min(MOST, int(counts.max()))
    kept = labels[counts >= each]
    kept = kept[torch.randperm(len(kept), generator=stream("few-shot", lab.preset))][:count]
    if each < 2 or len(kept) < 2:
        raise UserError(f"{lab.preset} has {len(kept)} labels with {each} images: too few")
    chosen = torch.stack([(found.labels == label).nonzero()[:each, 0] for label in kept])
    how = config.data.binarization
    pixels = data.binarize(found.images[chosen.flatten()], how, stream("few-shot", "pixels"))
    return data.to_float(pixels, how != "none").to(lab.device).unflatten(0, chosen.shape)


def shuffle(drawings: Drawings, generator: torch.Generator) -> Drawings:
    """Each character's drawings in an order of their own."""
    order = torch.rand(drawings.shape[:2], generator=generator, device=drawings.device)
    rows = torch.arange(len(drawings), device=drawings.device)[:, None]
    return drawings[rows, order.argsort(dim=1)]


def mix_episodes(targets: Float[Tensor, "N C H W"]) -> Float[Tensor, "N T C H W"]:
    """Each target in the middle of an episode of other characters' targets, as in training."""
    around = torch.arange(COMPANY) - COMPANY // 2
    return targets[(torch.arange(len(targets))[:, None] + around) % len(targets)]


@torch.no_grad()
def score(
    lab: Lab,
    model: MemoryModel,
    targets: Float[Tensor, "N C H W"],
    written: Drawings | None,
    name: int,
) -> PerCharacter:
    """The bound of each target under a memory of its row of `written`; None: an empty memory."""
    episodes, found = mix_episodes(targets), []
    for start in range(0, len(targets), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        images, noise = episodes[part], lab.noise("few-shot", name, start)
        memory = None
        if model.remembers and written is None:
            memory = model.empty(len(images))
        elif model.remembers and written is not None:
            memory = model.write(written[part], generator=lab.noise("write", name, start))
        terms = model.elbo(images, memory, generator=noise)
        found.append(terms.nll_nats[:, COMPANY // 2].double().cpu())
    return torch.cat(found)


def measure(
    lab: Lab, model: MemoryModel, drawings: Drawings, counts: list[int], rounds: int
) -> dict[str, Any]:
    """Bounds on drawings that are not written, for each number that is; `gain` is what the own
    character's memory saves against another's, `over_empty` against an empty one."""
    scores: dict[Any, list[PerCharacter]] = {}
    for number in range(rounds):
        mixed = shuffle(drawings, lab.noise("deal", number))
        targets, rest = mixed[:, 0], mixed[:, 1:]
        memories: dict[Any, Drawings | None] = {"empty": None}
        for count in counts:
            some = rest[:, :count]
            memories |= {(count, "own"): some, (count, "other"): some.roll(1, 0)}
        for name, written in memories.items():
            scores.setdefault(name, []).append(score(lab, model, targets, written, number))
    means = {name: torch.stack(each).mean(dim=0) for name, each in scores.items()}
    result: dict[str, Any] = {"empty": estimate(means["empty"], "error"), "written": []}
    for count in counts:
        own, other = means[count, "own"], means[count, "other"]
        values = {"own": own, "other": other}
        values |= {"gain": other - own, "over_empty": means["empty"] - own}
        row = {name: estimate(value, "error") for name, value in values.items()}
        result["written"].append({"count": count} | row)
    return result


def verdict(figures: Figures) -> str:
    """Which models profit from other drawings of a character."""
    last = {name: found["written"][-1] for name, found in figures["models"].items()}
    helped, not_helped = [], []
    for name, row in last.items():
        if name == "vae":
            continue
        gain, over = row["gain"], row["over_empty"]
        clear = min(one["mean"] - 2 * one["error"] for one in (gain, over)) > 0
        words = [f"{one['mean']:+.2f} ± {one['error']:.2f}" for one in (gain, over)]
        (helped if clear else not_helped).append(f"{name} {words[0]} ({words[1]})")
    count = next(iter(last.values()))["count"]
    best = min(last, key=lambda name: last[name]["own"]["mean"])
    return (
        f"What {count} drawings of a character tell of another, in nats against as many of another "
        f"character (against an empty memory): {'; '.join(helped) or 'nothing to any model'}. "
        + (f"No clear use to {'; '.join(not_helped)}. " if not_helped else "")
        + f"Cheapest there: {best}. All were trained on mixed episodes, and there is no sampler "
        "of one-character episodes here: figures of models so trained are not comparable."
    )


def run(lab: Lab) -> Finding:
    drawings = characters(lab, lab.pick(48, None))
    counts = [count for count in WRITTEN if count < drawings.shape[1]]
    rounds = lab.pick(2, 4)
    figures = {
        "characters": len(drawings),
        "rounds": rounds,
        "written": counts,
        "models": {
            label: measure(lab, lab.trained(*named), drawings, counts, rounds)
            for label, named in MODELS.items()
        },
    }
    return Finding(figures, table(figures), draw(lab, figures))


def table(figures: Figures) -> list[str]:
    """Three blocks, a row for each model and a column for each number of drawings."""
    rows = [["drawings written", "none", *map(str, figures["written"])]]
    for key, called in SCORES.items():
        for label, found in figures["models"].items():
            start = f"{found['empty']['mean']:.2f}" if key == "own" else ""
            cells = [nats(row[key]) for row in found["written"]]
            rows.append([f"{called}, {label}", start, *cells])
    return [
        *columns(rows, left=1).splitlines(),
        "own: bound of a drawing that is not written, under drawings of its character; gain: the "
        "same under as many of",
        "another character, less that; over: the same under an empty memory, less that",
        f"nats per image ± standard error over {figures['characters']} characters, "
        f"{figures['rounds']} drawings of each left out in turn; one seed",
    ]


def nats(value: Estimate) -> str:
    """With its error; shorter where a model does not know what it sees."""
    mean, error = value["mean"], value["error"]
    known = max(abs(mean), 10 * error) < OFF
    return f"{mean:.2f}±{error:.2f}" if known else f"{mean:.0e}±{error:.0e}"


def draw(lab: Lab, figures: Figures) -> Figure:
    """What is gained, twice, and what it costs, against the number of drawings written."""
    counts = figures["written"]
    figure = plots.canvas(
        15.2,
        4.6,
        f"{lab.preset}: nats per drawing that is not written; {figures['characters']} unseen "
        "characters, ± standard error over them; models trained on mixed episodes",
    )
    titles = {
        "gain": "gained against another character's drawings",
        "over_empty": "gained against an empty memory",
        "own": "what it costs",
    }
    for axes, (key, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for label, found in figures["models"].items():
            if label != "vae" or key == "own":
                look = {"color": plots.COLOURS[label.split()[0]], "label": label}
                look |= {"ls": ":" if label == "kpp store" else "-"}
                values = [row[key] for row in found["written"]]
                plots.draw_line(axes, range(len(counts)), values, **look)
        across = "drawings of its character that are written"
        plots.finish_axes(axes, across, counts, title, range(len(counts)))
        if max(abs(end) for end in axes.get_ylim()) > OFF:  # a model far off hides the others
            axes.set_yscale("log" if key == "own" else "symlog")
    figure.axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


ABOUT = About(
    paper="beyond",
    shows="nats gained on unwritten drawings of a written character",
    claim="A memory of some drawings of a character makes other drawings of it cheaper, the more "
    "the more were written.",
    quick="about 4 min on two cores",
    full="2 h on a GPU",
    presets=("omniglot",),
)
