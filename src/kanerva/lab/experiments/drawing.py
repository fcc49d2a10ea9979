"""Models that draw pictures. Shared by `perturb`, `random_keys` and `vae_vs_kpp`."""

from kanerva.data.registry import DATASETS
from kanerva.lab.harness import Lab
from kanerva.models.base import MemoryModel

MODELS = ("kpp-bits", "kpp-paper", "vae")
RETIRED = "kpp-generate"  # a variant of kpp, in records of earlier versions
GROUP = 32  # images among which the nearest is searched: an episode of `kpp`


def models_for(preset: str) -> tuple[str, ...]:
    """The models that take the pixels of a data set: `kpp-bits` needs binary ones."""
    binary = DATASETS[preset].binarization != "none"
    return tuple(name for name in MODELS if binary or name != "kpp-bits")


def train_to_draw(lab: Lab, name: str) -> tuple[MemoryModel, int]:
    """A trained model, and how many images it writes to a memory. GROUP is a multiple of it."""
    length = lab.config(name).episode_length
    return lab.trained(name), length if GROUP % length == 0 else GROUP


def is_binary(model: MemoryModel) -> bool:
    """Whether true pixels are black or white."""
    return model.config.likelihood == "bernoulli"


def join(name: str, how: str) -> str:
    """A model's name, and how pictures were made, if given."""
    return ", ".join(filter(None, [name, how]))
