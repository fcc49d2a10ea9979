"""The models by name. Each is imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

from kanerva.config import ModelConfig, model_config
from kanerva.errors import UserError
from kanerva.plain_files import shown

if TYPE_CHECKING:
    from kanerva.models.base import MemoryModel

CLASSES = {  # name: (module, class)
    "kpp": ("kanerva.models.kpp", "Kpp"),
    "kpp-bits": ("kanerva.models.kpp_bits", "KppBits"),
    "kpp-empty": ("kanerva.models.kpp_empty", "KppEmpty"),
    "kpp-bits-empty": ("kanerva.models.kpp_bits_empty", "KppBitsEmpty"),
    "kpp-paper": ("kanerva.models.kpp_paper", "KppPaper"),
    "vae": ("kanerva.models.rivals.no_memory", "Vae"),
    "no-memory": ("kanerva.models.rivals.no_memory", "NoMemory"),
    "km": ("kanerva.models.rivals.km", "KanervaMachine"),
    "dkm": ("kanerva.models.rivals.km", "DynamicKanervaMachine"),
    "dkm-tsm": ("kanerva.models.rivals.km", "DynamicKanervaMachine"),
    "vma": ("kanerva.models.rivals.vma", "VariationalMemoryAddressing"),
    "dnc": ("kanerva.models.rivals.dnc", "DifferentiableNeuralComputer"),
}


def model_class(name: str) -> "type[MemoryModel]":
    """The class of the model of that name."""
    model_config(name)  # raises an error that lists the names
    if name not in CLASSES:
        raise UserError(f"{name} has a config but no line in CLASSES of kanerva.models")
    module, cls = CLASSES[name]
    return getattr(import_module(module), cls)


def build(config: ModelConfig) -> "MemoryModel":
    """Make a new model of the class that its config names."""
    if not isinstance(config, ModelConfig):
        raise UserError(
            f"build takes a model's config, as kanerva.preset(NAME).model; got {shown(config)}"
        )
    return model_class(config.name)(config)
