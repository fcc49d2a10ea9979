"""Fig. 10, left (§4.3): the bound against the length T of an episode."""

from matplotlib.figure import Figure

from kanerva.lab.experiments.sweep import (
    Setting,
    equal_runs,
    finished,
    in_episodes_of,
    line_over,
    measured,
    over_values,
    rows,
    seeds,
    seeds_of,
    seeds_said,
)
from kanerva.lab.harness import Experiment, Finding, Lab
from kanerva.pictures import MODEL_COLOURS

LENGTHS = (5, 16, 32, 64)
PAPER = 0.625  # nats: one deviation of the bound over T from 5 to 64 (§4.3)
CELLS = 36  # of kpp's preset; an episode that needs more gets 64, in a map of the same size


def setting(model: str, length: int, lab: Lab) -> Setting:
    """A run at T: as many images a step as at any other."""
    parts: dict = in_episodes_of(length, lab)
    if model == "kpp" and length > CELLS:
        parts = {"memory": {"capacity": 64}} | parts  # room first: a config is checked at each part
    return Setting(f"{model} T={length}", model, parts=parts)


def verdict_of(over_lengths: dict[str, dict]) -> str:
    """Does T matter? By the deviation and the trend of the means."""
    told = []
    for model, found in over_lengths.items():
        told.append(
            f"{model}'s bound goes from {found['first']:.1f} at the shortest T to "
            f"{found['last']:.1f} at the longest (std over T {found['std']:.2f})"
        )
    paper = over_lengths["kpp-paper"]
    holds = paper["std"] <= max(PAPER, paper["seed_std"] or 0.0)
    claim = (
        f"As in the paper, T does not matter to kpp-paper (std at most {PAPER}, or that of seeds)"
        if holds
        else f"T matters more to kpp-paper than the paper's {PAPER} nats: the claim does NOT hold"
    )
    return f"{claim}: {'; '.join(told)}; {seeds_said(paper)}."


def run(lab: Lab) -> Finding:
    lengths = list(lab.pick(LENGTHS[:3], LENGTHS))
    chosen = seeds(lab)
    by_model = {
        model: [
            measured(equal_runs(lab, quick), setting(model, length, lab), chosen)
            for length in lengths
        ]
        for model, quick in (("kpp-paper", 250), ("kpp", 350))
    }
    over_lengths = {model: over_values(found, "nll_nats") for model, found in by_model.items()}
    figures = {"paper_std": PAPER, "T": lengths, "entries": by_model, "over_T": over_lengths}
    lines = []
    for entries in by_model.values():
        lines += [*rows(entries), ""]
    for model, found in over_lengths.items():
        lines.append(
            f"{model}: std of the bound over T {found['std']:.2f}, range {found['range']:.2f} "
            f"nats; the paper's std {PAPER}"
        )
    if lengths[-1] > CELLS:
        lines.append(f"kpp has {CELLS} cells, and 64 smaller ones at T={lengths[-1]}, in one map")
    return Finding(figures, lines, verdict_of(over_lengths), {"": drawn(lab, lengths, by_model)})


def drawn(lab: Lab, lengths: list[int], by_model: dict[str, list[dict]]) -> Figure:
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for model, entries in by_model.items():
        line_over(left, lengths, entries, "nll_nats", model, color=MODEL_COLOURS[model])
        for term, name, style in (("kl_z", "KL z", "-"), ("kl_y", "KL y", ":")):
            line_over(
                right,
                lengths,
                entries,
                term,
                f"{model}, {name}",
                color=MODEL_COLOURS[model],
                ls=style,
            )
    floors = [entry["floor"] for entry in by_model["kpp"]]
    left.plot(range(len(lengths)), floors, "k--", lw=1, label="floor ln T")
    finished(left, "episode length T", "test bound")
    finished(right, "episode length T", "its divergences")
    first = by_model["kpp"][0]
    figure.suptitle(
        f"{lab.preset}: {seeds_of(first)}, about {images(by_model)} images a step at every T",
        fontsize=10,
    )
    return figure


def images(by_model: dict[str, list[dict]]) -> int:
    """The most that a step sees."""
    return max(entry["images_per_step"] for entries in by_model.values() for entry in entries)


EXPERIMENT = Experiment(
    name="episode-length",
    paper="Fig. 10, left",
    shows="the bound and its divergences against T",
    claim="The bound does not depend on the length of episodes: trained with T from 5 to 64, it "
    "varies by one standard deviation of 0.625 nats per image.",
    run=run,
    full="3 h on a GPU",
    presets=("mnist",),
)
