"""What every model offers: write, read, recall, generate, elbo; weights saved as plain files."""

import hashlib
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from kanerva.config import ModelConfig, from_dict, to_dict
from kanerva.errors import UserError
from kanerva.files import read_tensors, write_tensors
from kanerva.likelihoods import make_likelihood
from kanerva.memory.heap import Memory
from kanerva.memory.quantise import bits, rounded
from kanerva.shapes import Episode, PerImage, Readout

WEIGHTS, CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True)
class ElboTerms:
    """The three terms of L_T (Eq. 4) in nats for each image of each episode."""

    log_likelihood: PerImage  # ln p(x|z, M, y)
    readout_kl: PerImage  # KL[q(z|.) || p(z|M, y)]
    key_kl: PerImage  # KL[q(y|.) || p(y)], all K heads

    @property
    def elbo(self) -> PerImage:
        """Higher is better: a lower bound on ln p(x|M)."""
        return self.log_likelihood - self.readout_kl - self.key_kl

    @property
    def nll_nats(self) -> PerImage:
        """Lower is better: an upper bound on -ln p(x|M)."""
        return -self.elbo

    @property
    def loss(self) -> Float[Tensor, ""]:
        """What training minimises: the mean of `nll_nats`."""
        return self.nll_nats.mean()

    def by_name(self) -> dict[str, Tensor]:
        """The three terms in a plain container (a compiler makes nothing of `vars`)."""
        return {
            "log_likelihood": self.log_likelihood,
            "readout_kl": self.readout_kl,
            "key_kl": self.key_kl,
        }

    def view(self, shape: tuple[int, ...]) -> "ElboTerms":
        """The same images, grouped otherwise."""
        return ElboTerms(*[term.view(shape) for term in self.by_name().values()])

    def __getitem__(self, episode: int) -> "ElboTerms":
        """One episode's terms out of a batch."""
        return ElboTerms(
            self.log_likelihood[episode], self.readout_kl[episode], self.key_kl[episode]
        )


@dataclass(frozen=True)
class JointDensity:
    """ln p(x, z, y | M), piece by piece, for each image: what the generative side alone says."""

    log_likelihood: PerImage
    readout_log_prior: PerImage
    key_log_prior: PerImage

    @property
    def total(self) -> PerImage:
        return self.log_likelihood + self.readout_log_prior + self.key_log_prior


def all_but_one(length: int, device: torch.device) -> Int[Tensor, "T rest"]:
    """Row t: the numbers of an episode's images without t."""
    if length < 2:
        raise UserError(f"leaving one image out needs an episode of at least 2, got {length}")
    rest = torch.arange(length - 1, device=device).expand(length, -1)
    return rest + (rest >= torch.arange(length, device=device)[:, None])


Images = Shaped[Tensor, "*B T C H W"]
Weigh = Callable[[], PerImage]  # a log-weight of each image, of new latents at each call
M = TypeVar("M", bound="MemoryModel")


CARD = """---
{{ card_data }}
---

A generative memory model, written with the Python package `kanerva`.

    import kanerva
    model = kanerva.load("OWNER/NAME")          # this repository's id, or a folder with its files
    memory = model.write(images)                # (T, C, H, W) on [0, 1]
    recalled = model.recall(memory, images)

`config.json` holds its sizes. Say here what it was trained on, and quote the record of
`kanerva evaluate` with its protocol.
"""


class MemoryModel(
    nn.Module,
    PyTorchModelHubMixin,
    ABC,
    library_name="kanerva",
    tags=["memory"],
    model_card_template=CARD,
):
    """A generative model with an episodic memory.

    Images are floats on [0, 1] (for 8-bit likelihoods also uint8, divided by 255): one episode
    (T, C, H, W) or a batch (B, T, C, H, W). What comes back has the batch dimension that went in.
    """

    decoder: nn.Module  # of readouts, to parameters of the likelihood

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.likelihood = make_likelihood(config.likelihood)
        self.memory_dtype = "float32"  # what `write` and scores round memories to

    reconstructed = "reconstructed"  # what a picture of `reconstruct` is labelled
    remembers = True  # False: nothing is ever written, and `write` says so
    recalls = True  # False: a cue finds nothing, and `recall` says so
    has_keys = True  # False: nothing lies near to anything, and `generate(near=...)` says so
    in_turn = False  # True: images are written one after another, a loop that is not compiled

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        """Of one episode's memory, when it holds so many images: all that p reads of them."""
        return self.config.memory.shape

    def memory_bits(self, length: int, dtype: str = "float32") -> float:
        """Of the same, stored as `dtype`."""
        return float(bits(math.prod(self.memory_shape(length)), dtype))

    def memory_kl(self, images: Images, *, generator: torch.Generator | None = None) -> PerImage:
        """KL[q(M|X) || p(M)] / T for each image, where a model has a distribution over memories."""
        raise UserError(f"{self.config.model} has no distribution over memories")

    has_memory_kl = False

    def measure(self, images: Images) -> None:
        """Before a first step: what a model takes from training images themselves, as a rule
        nothing."""

    @property
    @abstractmethod
    def key_shape(self) -> tuple[int, ...]:
        """The shape of one sample's key, N(0, 1) a priori."""

    @abstractmethod
    def traces(
        self, maps: Float[Tensor, "B Cm Hm Wm"], keys: Float[Tensor, "B T *key"]
    ) -> Float[Tensor, "B T *trace"]:
        """What a memory holds where keys point (Eq. 5)."""

    @abstractmethod
    def write(self, images: Images, *, generator: torch.Generator | None = None) -> Memory: ...

    @abstractmethod
    def recall(
        self,
        memory: Memory,
        cue: Images,
        *,
        steps: int = 10,
        sample: bool = False,
        observed: Float[Tensor, "*B T H W"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "S *B T C H W"]: ...

    @abstractmethod
    def generate(
        self,
        memory: Memory | None,
        num_samples: int,
        *,
        near: tuple[Float[Tensor, "*key"], float] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "*B T C H W"]: ...

    @abstractmethod
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]: ...

    @abstractmethod
    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> ElboTerms: ...

    @abstractmethod
    def weighing(self, episode: Episode, generator: torch.Generator | None) -> Weigh:
        """M and q of an episode; what is given back draws latents at each call."""

    def log_weights(
        self, images: Images, samples: int, *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "samples *B T"]:
        """ln p(x, latents | M) - ln q(latents | X), draw by draw, M fixed: their log-mean-exp is
        IWAE's bound."""
        if samples < 1:
            raise UserError(f"samples must be at least 1, got {samples}")
        draw = self.weighing(self.as_pixels(images), generator)
        weights = torch.stack([draw() for _ in range(samples)])
        return weights if images.ndim == 5 else weights[:, 0]

    @abstractmethod
    def left_out(
        self, images: Images, *, generator: torch.Generator | None = None
    ) -> ElboTerms: ...

    @abstractmethod
    def permuted(
        self, images: Images, *, generator: torch.Generator | None = None
    ) -> ElboTerms: ...

    @abstractmethod
    def empty(self, batch: int | None = None) -> Memory: ...

    def append(
        self, memory: Memory, images: Images, *, generator: torch.Generator | None = None
    ) -> Memory:
        """Write more into a memory, where a model can."""
        raise UserError(
            f"{self.config.model} writes its memory as a whole: nothing can be appended"
        )

    def familiarity(self, memory: Memory, images: Images) -> PerImage:
        """Nats by which a memory knows an image, where a model can tell."""
        raise UserError(f"{self.config.model} cannot tell what its memory holds")

    def draw_pixels(self, readout: Readout, generator: torch.Generator | None = None) -> Episode:
        """Pixels of p(x | z)."""
        return self.likelihood.sample(self.decoder(readout), generator)

    def given(self, memory: Memory | None) -> Memory:
        """A memory that a method cannot do without."""
        if memory is None:
            raise UserError(f"{self.config.model} generates from a memory: write one first")
        return memory

    def prior_keys(
        self,
        memory: Memory | None,
        num_samples: int,
        near: tuple[Tensor, float] | None,
        generator: torch.Generator | None,
    ) -> tuple[Float[Tensor, "B Cm Hm Wm"], Float[Tensor, "B T *key"]]:
        """A memory's map and keys drawn from N(0, 1), or around a given one: y + spread * noise."""
        maps = self.as_maps(self.given(memory))
        if num_samples < 0:
            raise UserError(f"num_samples must not be negative, got {num_samples}")
        shape = (len(maps), num_samples, *self.key_shape)
        keys = torch.randn(shape, generator=generator, device=maps.device)
        if near is not None:
            key, spread = near
            if tuple(key.shape) != self.key_shape:
                raise UserError(f"a key here is {self.key_shape}, got {tuple(key.shape)}")
            keys = key.to(maps.device) + spread * keys
        return maps, keys

    def again(
        self, memory: Memory, cue: Images, steps: int, read: Callable[[Episode], Episode]
    ) -> Float[Tensor, "S *B T C H W"]:
        """Iterative reading: `read` makes a picture of the last one, at first of the cue."""
        if steps < 1:
            raise UserError(f"steps must be at least 1, got {steps}")
        picture, pictures = self.as_episodes(cue), []
        for _ in range(steps):
            picture = read(picture)
            pictures.append(picture if memory.is_batch else picture[0])
        return torch.stack(pictures)

    def settled(self, maps: Float[Tensor, "B Cm Hm Wm"]) -> Float[Tensor, "B Cm Hm Wm"]:
        """Memories as they are kept: rounded to `memory_dtype`."""
        return maps if self.memory_dtype == "float32" else rounded(maps, self.memory_dtype)

    def forward(self, episode: Episode) -> dict[str, Tensor]:
        """The training objective: `ElboTerms` by name, because the wrappers that spread a module
        over devices look for tensors in plain containers only. `auxiliary`, where a model adds it,
        is minimised besides and enters no figure."""
        return self.elbo(episode).by_name()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def as_episodes(self, images: Images) -> Episode:
        """Check what a user passed and give it a batch dimension."""
        if images.ndim not in (4, 5) or tuple(images.shape[-3:]) != self.config.image:
            raise UserError(
                f"expected images (T, C, H, W) or (B, T, C, H, W) with (C, H, W) = "
                f"{self.config.image}, got {tuple(images.shape)}"
            )
        if images.shape[-4] == 0:
            raise UserError("an episode needs at least one image, got none")
        if images.dtype == torch.uint8:
            if self.config.likelihood.kind == "bernoulli":
                raise UserError(
                    "this model takes pixels that are 0 or 1 as floats, got uint8: "
                    "kanerva.data.binarize, then kanerva.data.to_float"
                )
            images = images / 255
        if not images.is_floating_point():
            raise UserError(f"expected float images on [0, 1] or uint8, got {images.dtype}")
        images = images.float()
        return images if images.ndim == 5 else images[None]

    def as_pixels(self, images: Images) -> Episode:
        """An episode that is to be scored: outside training, only pixels p is a density of."""
        episode = self.as_episodes(images)
        if not self.training:
            self.likelihood.check(episode)
        return episode

    def as_maps(self, memory: Memory, images: Images | None = None) -> Float[Tensor, "B Cm Hm Wm"]:
        """Check that a memory fits this model (and the images it is used with)."""
        expected = self.memory_shape(0 if images is None else images.shape[-4])
        if tuple(memory.map.shape[-3:]) != expected:
            raise UserError(
                f"this model's memories are {expected}, got {tuple(memory.map.shape[-3:])}"
            )
        if memory.map.device != self.device:
            raise UserError(
                f"the memory is on {memory.map.device}, the model on {self.device}: "
                "memory.to(model.device)"
            )
        if images is not None:
            mine = memory.map.shape[0] if memory.is_batch else None
            theirs = images.shape[0] if images.ndim == 5 else None
            if mine != theirs:
                raise UserError(
                    f"memory of {mine or 'one'} episode(s) used with images {tuple(images.shape)}: "
                    "both must be one episode, or batches of the same size"
                )
        return memory.map if memory.is_batch else memory.map[None]

    # Weights are two files, model.safetensors and config.json, here and on the Hub;
    # `save_pretrained` adds a card.

    def _save_pretrained(self, save_directory: Path) -> None:
        save_weights(self, save_directory)

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls: type[M],
        pretrained_model_name_or_path: str | Path,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
        map_location: str | torch.device = "cpu",
    ) -> M:
        """Load from a folder or a Hub id; the model comes in evaluation mode."""
        name = str(pretrained_model_name_or_path)
        if os.path.isdir(name):
            files = {file: Path(name) / file for file in (CONFIG, WEIGHTS)}
        else:
            files = {
                file: hub_file(
                    name,
                    file,
                    force_download=force_download,
                    token=token,
                    cache_dir=cache_dir,
                    local_files_only=local_files_only,
                    revision=revision,
                )
                for file in (CONFIG, WEIGHTS)
            }
        model = cls(read_config(files[CONFIG]))
        load_weights(model, files[WEIGHTS])
        return model.to(map_location).eval()


def hub_file(name: str, file: str, **options: object) -> Path:
    """One file of a Hub repository."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries are not our words
    try:
        return Path(hf_hub_download(name, file, **options))  # pyright: ignore
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{name!r} is neither a run folder nor reachable as a Hub id: {first}"
        ) from error


def save_weights(
    model: MemoryModel, folder: Path, weights: dict[str, Tensor] | None = None
) -> None:
    """Write `model.safetensors` and `config.json` into a folder; the first knows the second.
    `weights` are the model's own, unless given."""
    state = model.state_dict() if weights is None else weights
    write_tensors(folder / WEIGHTS, state, {"format": "pt", "config": _name(to_dict(model.config))})
    (folder / CONFIG).write_text(json.dumps(to_dict(model.config), indent=2) + "\n")


def _name(config: object) -> str:
    """A hash of a config as it is written, by which weights recognise theirs: options that a later
    version adds do not count."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def read_config(path: Path) -> ModelConfig:
    """The `ModelConfig` a checkpoint was made with."""
    if not path.is_file():
        raise UserError(f"no checkpoint here: {path} is missing")
    try:
        data = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is damaged or unreadable: {error}") from error
    return from_dict(ModelConfig, data, where=str(path))


def load_weights(
    model: MemoryModel, path: Path, place: Callable[[Tensor, Tensor], Tensor] | None = None
) -> None:
    """Fill a model from `model.safetensors`; names, shapes and config must be those it had.
    `place` turns a tensor of the file into one like the model's own, where that is needed."""
    state, about = read_tensors(path)
    expected = model.state_dict()
    for name in sorted(expected.keys() ^ state.keys()):
        side = "lacks" if name in expected else "has an unknown tensor"
        raise UserError(f"{path} does not fit its config.json: it {side} {name}")
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise UserError(
                f"{path} does not fit its config.json: {name} is {tuple(value.shape)}, "
                f"not {tuple(expected[name].shape)}"
            )
    written = json.loads((path.parent / CONFIG).read_text())
    if about.get("config", _name(written)) != _name(written):
        raise UserError(f"{path} does not fit its config.json, which was altered")
    if place is not None:
        state = {name: place(value, expected[name]) for name, value in state.items()}
    model.load_state_dict(state)
