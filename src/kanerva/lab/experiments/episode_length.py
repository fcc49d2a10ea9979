"""Fig. 10, left (§4.3): the bound against the length T of an episode."""

from matplotlib.figure import Figure

from kanerva.lab.experiments.sweep import (
    Setting,
    equal_runs,
    finish_axes,
    in_episodes_of,
    line_over,
    over_values,
    rows,
    seeds,
    seeds_in_words,
    seeds_of,
    train_and_score,
    two_panels,
    within_published,
)
from kanerva.lab.harness import Experiment, Figures, Finding, Lab
from kanerva.lab.paper_figures import EPISODE_LENGTH_STD
from kanerva.pictures import MODEL_COLOURS

LENGTHS = (5, 16, 32, 64)
CELLS = 36  # of kpp's preset; an episode that needs more gets 64, in a map of the same size


def setting(model: str, length: int, lab: Lab) -> Setting:
    """A run at T: as many images a step as at any other."""
    parts: dict = in_episodes_of(length, lab)
    if model == "kpp" and length > CELLS:
        parts["memory"] = {"capacity": 64}
    return Setting(f"{model} T={length}", model, parts=parts)


def verdict(figures: Figures) -> str:
    """Does T matter? By the deviation and the trend of the means."""
    claim = (
        f"As in the paper, T does not matter to kpp-paper (std at most {EPISODE_LENGTH_STD}, or "
        "that of seeds)"
        if within_published(figures["over_T"]["kpp-paper"], EPISODE_LENGTH_STD)
        else f"T matters more to kpp-paper than the paper's {EPISODE_LENGTH_STD} nats: the claim "
        "does NOT hold"
    )
    words = [
        f"{model}'s bound goes from {found['first']:.1f} at the shortest T to {found['last']:.1f} "
        f"at the longest (std over T {found['std']:.2f})"
        for model, found in figures["over_T"].items()
    ]
    return f"{claim}: {'; '.join(words)}; {seeds_in_words(figures['over_T']['kpp-paper'])}."


def run(lab: Lab) -> Finding:
    lengths = list(lab.pick(LENGTHS[:3], LENGTHS))
    chosen = seeds(lab)
    by_model = {
        model: [
            train_and_score(equal_runs(lab, quick), setting(model, length, lab), chosen)
            for length in lengths
        ]
        for model, quick in (("kpp-paper", 250), ("kpp", 350))
    }
    figures = {
        "paper_std": EPISODE_LENGTH_STD,
        "T": lengths,
        "entries": by_model,
        "over_T": {model: over_values(found, "nll_nats") for model, found in by_model.items()},
    }
    return Finding(figures, table(figures), {"": draw(lab, lengths, by_model)})


def table(figures: Figures) -> list[str]:
    lines = []
    for entries in figures["entries"].values():
        lines += [*rows(entries), ""]
    for model, found in figures["over_T"].items():
        lines.append(
            f"{model}: std of the bound over T {found['std']:.2f}, range {found['range']:.2f} "
            f"nats; the paper's std {EPISODE_LENGTH_STD}"
        )
    longest = figures["T"][-1]
    if longest > CELLS:
        lines.append(f"kpp has {CELLS} cells, and 64 smaller ones at T={longest}, in one map")
    return lines


def draw(lab: Lab, lengths: list[int], by_model: dict[str, list[dict]]) -> Figure:
    first = by_model["kpp"][0]
    figure = two_panels(
        f"{lab.preset}: {seeds_of(first)}, about {images(by_model)} images a step at every T"
    )
    left, right = figure.axes
    for model, entries in by_model.items():
        colour = MODEL_COLOURS[model]
        line_over(left, lengths, entries, "nll_nats", model, color=colour)
        for term, name, style in (("kl_z", "KL z", "-"), ("kl_y", "KL y", ":")):
            line_over(right, lengths, entries, term, f"{model}, {name}", color=colour, ls=style)
    floors = [entry["floor"] for entry in by_model["kpp"]]
    left.plot(range(len(lengths)), floors, "k--", lw=1, label="floor ln T")
    finish_axes(left, "episode length T", "test bound")
    finish_axes(right, "episode length T", "its divergences")
    return figure


def images(by_model: dict[str, list[dict]]) -> int:
    """The most that a step sees."""
    return max(entry["images_per_step"] for entries in by_model.values() for entry in entries)


EXPERIMENT = Experiment(
    name="episode-length",
    paper="Fig. 10, left",
    shows="the bound and its divergences against T",
    claim="The bound does not depend on the length of episodes: trained with T from 5 to 64, it "
    f"varies by one standard deviation of {EPISODE_LENGTH_STD} nats per image.",
    run=run,
    verdict=verdict,
    full="3 h on a GPU",
    presets=("mnist",),
)
