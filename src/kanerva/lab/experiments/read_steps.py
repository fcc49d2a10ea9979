"""Fig. 10, right (§4.3): the divergences against the number K of blocks read for each image."""

from kanerva.config import PaperMemoryConfig
from kanerva.lab.experiments import sweep
from kanerva.lab.experiments.sweep import Setting
from kanerva.lab.harness import About, Figures, Finding, Lab
from kanerva.lab.paper_figures import READS_KL_STD

READS = (1, 2, 8, 64)


def verdict(figures: Figures) -> str:
    """Whether K matters: the standard deviation of the KL and of the bound over K."""
    kl, total = figures["over_K"]["kl"], figures["over_K"]["nll_nats"]
    words = [
        f"over K the total KL has std {kl['std']:.2f}, the bound {total['std']:.2f}",
        f"the keys tell up to {figures['largest_kl_y']:.2f} nats",
    ]
    if figures["largest_kl_y"] < 0.5:
        words[-1] += ", so what is read hardly depends on the image, whatever K"
    likely = figures["likely_over_K"]
    words.append(
        f"by kl_over_T, no bound, the KL / T has std {likely['kl']['std']:.3f}, the whole "
        f"{likely['nll_nats']['std']:.2f}"
    )
    claims = ("As in the paper, K does not matter", "The KL varies more")
    judged = sweep.judge_sweep(kl, READS_KL_STD, *claims, words)
    return f"{judged} kpp has no K: it reads the one block that an image wrote."


def setting(count: int) -> Setting:
    """The setting with K reads per image."""
    suffix = "" if count == PaperMemoryConfig.reads else f"-K{count}"
    return sweep.of_paper(f"kpp-paper K={count}", "kpp-paper", suffix, memory={"reads": count})


def run(lab: Lab) -> Finding:
    reads = list(lab.pick(READS[:3], READS))
    settings = [setting(count) for count in reads]
    entries = None if lab.quick else sweep.read_entries(settings, lab.preset, least=1)
    if entries is None:
        equal, chosen = sweep.equal_runs(lab, 200), sweep.seeds(lab, 1)
        entries = [sweep.train_and_score(equal, one, chosen) for one in settings]
    terms = ("kl", "nll_nats")
    figures = {
        "paper_std": READS_KL_STD,
        "K": reads,
        "entries": entries,
        "over_K": {term: sweep.over_values(entries, term) for term in terms},
        "likely_over_K": {term: sweep.over_values(entries, term, "kl_over_T") for term in terms},
        "largest_kl_y": max(entry["bound"]["kl_y"]["mean"] for entry in entries),
        "kpp": "not applicable: one block for each image, memory.reads=1",
    }
    across = "blocks read for each image, K"
    picture = sweep.draw_sweep(lab, across, reads, {"kpp-paper": entries})
    return Finding(figures, table(figures), picture)


def table(figures: Figures) -> list[str]:
    over, likely = figures["over_K"], figures["likely_over_K"]
    return [
        *sweep.rows(figures["entries"]),
        f"over K: std of the total KL {over['kl']['std']:.3f}, of the bound "
        f"{over['nll_nats']['std']:.3f}; the paper's std of the KL {READS_KL_STD}",
        f"by kl_over_T: std of the KL / T {likely['kl']['std']:.3f}, of the whole "
        f"{likely['nll_nats']['std']:.3f}",
        "kpp: not applicable, it reads one block for each image",
    ]


ABOUT = About(
    paper="Fig. 10, right",
    shows="the bound and its divergences against K",
    claim="The number of reads hardly matters: for K from 1 to 64 the total test KL varies by one "
    f"standard deviation of {READS_KL_STD} nats per image (MNIST).",
    full="seconds from records, else 1 h on a GPU",
    presets=("omniglot",),
)
