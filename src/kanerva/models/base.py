"""What every model offers, and what each can do: verbs, capabilities, checks of what users pass."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import PyTorchModelHubMixin
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from kanerva.config import ModelConfig
from kanerva.distributions import ReadDistribution
from kanerva.errors import UserError
from kanerva.inputs import as_count, require_tensor_images
from kanerva.likelihoods import make_likelihood
from kanerva.memory.heap import Memory, require_memory_object
from kanerva.memory.quantise import bits, quantise
from kanerva.models.checkpoint_io import CARD, load_pretrained, save_weights
from kanerva.models.pixels import PixelFormat
from kanerva.models.terms import ElboTerms
from kanerva.models.weights import KnownWeights
from kanerva.plain_files import reason, write_whole
from kanerva.seeding import Noise, as_generator
from kanerva.shapes import Episode, PerImage, Readout

Images = Shaped[Tensor, "*B T C H W"]
Observed = Shaped[Tensor, "*B_T H W"]  # 1 where a pixel is visible; a mask, or one for each cue
Near = tuple[Float[Tensor, "*key"], float]  # a key, and how far around it
Handles = Int[Tensor, "*B T"] | Sequence[int]
LogWeights = Callable[[], PerImage]  # a log-weight of each image, of new latents at each call
MOST_STEPS = 10  # of reading again, unless a caller says how many. ours
MOST_NUMBERS = 2**26  # in the pixels of samples that are drawn together
M = TypeVar("M", bound="MemoryModel")  # not Self: beartype checks methods one by one


class MemoryModel(
    KnownWeights,
    PyTorchModelHubMixin,
    ABC,
    library_name="kanerva",
    tags=["memory"],
    model_card_template=CARD,
):
    """A generative model with an episodic memory.

    Images are floats on [0, 1] (for 8-bit likelihoods also uint8, divided by 255): one episode
    (T, C, H, W) or a batch (B, T, C, H, W). What comes back has the batch dimension that went in.

    Whatever draws random numbers takes a `generator`; without one it draws from torch's own.
    """

    decoder: nn.Module  # of readouts, to parameters of the likelihood
    config: ModelConfig

    # Capabilities: what callers ask instead of asking for a class
    remembers = True  # False: nothing is ever written, and `write` says so
    recalls = True  # False: a cue finds nothing, and `recall` says so
    has_keys = True  # False: nothing lies near to anything, and `generate(near=...)` says so
    has_blocks = False  # True: each image has a block of its own, with a handle and a place
    has_code = False  # True: blocks are bits, counted when they are written
    is_exact = False  # True: the bound is -ln p itself, and nothing is drawn
    has_memory_kl = False  # True: a distribution over memories, whose KL `memory_kl` gives
    writes_sequentially = False  # True: images are written in a loop, which is not compiled
    reconstructed = "reconstructed"  # what a picture of `reconstruct` is labelled

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.likelihood = make_likelihood(config.likelihood)
        self.memory_dtype = "float32"  # what `write` and scores round memories to

    def storing_as(self: M, dtype: str) -> M:
        """This model, sharing its weights, with memories rounded to `dtype` when written."""
        other = copy.copy(self)
        other.memory_dtype = dtype
        return other

    def __repr__(self) -> str:
        """A line; parts of the network, such as `model.decoder`, print as torch has them."""
        about = f"{self.config.name}: images {self.pixels}"
        if self.remembers:
            about += f"; memory {'x'.join(map(str, self.memory_shape(0)))}"
        weights = sum(weight.numel() for weight in self.parameters())
        return f"{type(self).__name__}({about}; {weights:,} parameters, on {self.device})"

    @property
    def replays(self) -> bool:
        """Whether `generate` mostly gives back what is held, not what is like it."""
        return False

    # What a memory takes

    @abstractmethod
    def memory_shape(self, length: int) -> tuple[int, int, int]:
        """Of one episode's memory, when it holds so many images: all that p reads of them."""

    def memory_bits(self, length: int, dtype: str = "float32") -> float:
        """Of the same, stored as `dtype`."""
        return float(bits(math.prod(self.memory_shape(length)), dtype))

    def memory_kl(self, images: Images, *, generator: Noise = None) -> PerImage:
        """KL[q(M|X) || p(M)] / T for each image, where a model has a distribution over memories."""
        raise UserError(f"{self.config.name} has no distribution over memories")

    @property
    def readout_shapes(self) -> list[list[int]]:
        """Of each part of z."""
        return [[self.config.readout.size]]  # pyright: ignore[reportAttributeAccessIssue]

    @property
    @abstractmethod
    def key_shape(self) -> tuple[int, ...]:
        """The shape of one sample's key, N(0, 1) a priori."""

    # Verbs

    @abstractmethod
    def write(self, images: Images, *, generator: Noise = None) -> Memory: ...

    @abstractmethod
    def read(
        self,
        memory: Memory,
        keys: Float[Tensor, "*B_T_key"] | None = None,
        *,
        handles: Handles | None = None,
    ) -> ReadDistribution:
        """p(z | M, y) at keys, or where handles lie; (B, T, L), B = 1 for one episode."""

    @abstractmethod
    def recall(
        self,
        memory: Memory,
        cue: Images,
        *,
        steps: int | None = None,
        sample: bool = False,
        observed: Observed | None = None,
        generator: Noise = None,
    ) -> Float[Tensor, "S *B T C H W"]: ...

    @abstractmethod
    def generate(
        self,
        memory: Memory | None,
        num_samples: int,
        *,
        near: Near | None = None,
        sample_pixels: bool = False,
        generator: Noise = None,
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
        generator: Noise = None,
    ) -> ElboTerms: ...

    @abstractmethod
    def left_out(self, images: Images, *, generator: Noise = None) -> ElboTerms: ...

    @abstractmethod
    def permuted(self, images: Images, *, generator: Noise = None) -> ElboTerms: ...

    @abstractmethod
    def empty(self, batch: int | None = None) -> Memory: ...

    def append(self, memory: Memory, images: Images, *, generator: Noise = None) -> Memory:
        """Write more into a memory, where a model can."""
        raise UserError(f"{self.config.name} writes its memory as a whole: nothing can be appended")

    def familiarity(self, memory: Memory, images: Images) -> PerImage:
        """Nats by which a memory knows an image, where a model can tell."""
        raise UserError(f"{self.config.name} cannot tell what its memory holds")

    def get(self, memory: Memory, handles: Handles | None = None) -> Float[Tensor, "*B T C H W"]:
        """Pictures of what is held, by handle, where a model has blocks."""
        raise UserError(f"{self.config.name} writes its memory as a whole: there are no handles")

    def find(self, memory: Memory, cue: Shaped[Tensor, "*T C H W"], **options: Any) -> Any:
        """Which image held a cue shows, and how surely, where a model can tell: see `Kpp.find`."""
        raise UserError(f"{self.config.name} writes its memory as a whole: none can be picked out")

    def resized(self: M, config: ModelConfig) -> M:
        """The same weights with a memory of another size, where a model can."""
        raise UserError(f"{self.config.name} cannot be scored in a memory of another size")

    def with_capacity(self: M, capacity: int) -> M:
        """The same weights with room for more images, where a model has blocks."""
        raise UserError(f"{self.config.name} writes its memory as a whole: it has no capacity")

    def fit_to_data(self, images: Images) -> None:
        """Before a first step: what a model takes from training images themselves, as a rule
        nothing."""

    def signed(self, memory: Memory) -> Memory:
        """A memory as one of this model's: no other reads it."""
        return replace(memory, writer=self.fingerprint())

    # Training and scores

    def forward(self, episode: Episode, generator: Noise = None) -> dict[str, Tensor]:
        """The training objective: `ElboTerms` by name, because the wrappers that spread a module
        over devices look for tensors in plain containers only. `auxiliary`, where a model adds it,
        is minimised besides and enters no figure."""
        return self.elbo(episode, generator=generator).by_name()

    def validation_terms(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """What decides which step of a training is best: the bound, where a memory is free."""
        return self.elbo(images, generator=generator)

    @abstractmethod
    def importance_sampler(self, episode: Episode, generator: Noise) -> LogWeights:
        """M and q of an episode; what is given back draws latents at each call."""

    def log_weights(
        self, images: Images, samples: int, *, generator: Noise = None
    ) -> Float[Tensor, "samples *B T"]:
        """ln p(x, latents | M) - ln q(latents | X), draw by draw, M fixed: their log-mean-exp is
        IWAE's bound."""
        as_count("samples", samples)
        draw = self.importance_sampler(self.as_pixels(images), generator)
        weights = torch.stack([draw() for _ in range(samples)])
        return weights if images.ndim == 5 else weights[:, 0]

    def sample_pixels(self, readout: Readout, generator: Noise = None) -> Episode:
        """Pixels of p(x | z)."""
        return self.likelihood.sample(self.decoder(readout), as_generator(generator))

    def quantised(self, maps: Float[Tensor, "B Cm Hm Wm"]) -> Float[Tensor, "B Cm Hm Wm"]:
        """Memories as they are kept: rounded to `memory_dtype`."""
        plain = self.memory_dtype == "float32" or maps.numel() == 0  # nothing is ever written
        return maps if plain else quantise(maps, self.memory_dtype)

    # Checks of what users pass

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def pixels(self) -> PixelFormat:
        """What images it writes and scores."""
        return PixelFormat(self.config.image, self.config.likelihood == "bernoulli")

    def as_episodes(self, images: Images) -> Episode:
        """Check what a user passed and give it a batch dimension."""
        steps = self.training and torch.is_grad_enabled()  # which skip bad images by their loss
        return self.pixels.as_episodes(images, finite=not steps)

    def as_pixels(self, images: Images) -> Episode:
        """An episode that is to be written or scored: outside training, only pixels that p is a
        density of."""
        episode = self.as_episodes(images)
        if not self.training:
            self.likelihood.check(episode)
        return episode

    def as_maps(self, memory: Memory, images: Images | None = None) -> Float[Tensor, "B Cm Hm Wm"]:
        """Check that a memory fits this model (and the images it is used with)."""
        require_memory_object(memory)
        if images is not None:
            require_tensor_images(images)
        self.check_shape(tuple(memory.map.shape[-3:]))
        if memory.map.device != self.device:
            raise UserError(
                f"the memory is on {memory.map.device}, the model on {self.device}: "
                "memory.to(model.device)"
            )
        if not self.training and memory.writer not in (None, self.fingerprint()):
            raise UserError(
                "this memory was written by another model, or by other weights of this one: load "
                "the one that wrote it"
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

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Refuse the map of another model's memory."""
        if shape != (expected := self.memory_shape(0)):
            raise UserError(f"this model's memories are {expected}, got {shape}")

    def check_keys(
        self, memory: Memory, keys: Float[Tensor, "*B_T_key"]
    ) -> tuple[Float[Tensor, "B Cm Hm Wm"], Float[Tensor, "B T *key"]]:
        """A memory's map and keys that fit it, as batches; one episode's keys may be either."""
        if not isinstance(keys, Tensor):
            raise UserError(f"keys are a tensor (T, *{self.key_shape}), got {type(keys).__name__}")
        maps, shape = self.as_maps(memory), tuple(keys.shape)
        keys = keys if keys.ndim == 2 + len(self.key_shape) else keys[None]
        if keys.ndim < 2 or len(keys) != len(maps) or tuple(keys.shape[2:]) != self.key_shape:
            raise UserError(f"keys {shape} do not fit memory {tuple(maps.shape)}")
        return maps, keys.to(maps.device)

    def require_memory(self, memory: Memory | None) -> Memory:
        """A memory that a method cannot do without; a blank one where nothing is ever written."""
        if not self.remembers:
            if memory is not None:
                raise UserError(f"{self.config.name} has no memory: give None")
            return Memory(torch.zeros(self.memory_shape(0), device=self.device))
        if memory is None:
            raise UserError(f"{self.config.name} generates from a memory: write one first")
        return require_memory_object(memory)

    def check_samples(self, num_samples: int, near: Near | None) -> None:
        """Refuse what `generate` cannot draw."""
        as_count("num_samples", num_samples)
        if num_samples * math.prod(self.config.image) > MOST_NUMBERS:
            most = MOST_NUMBERS // math.prod(self.config.image)
            raise UserError(f"{num_samples} samples are too many at once: at most {max(most, 1)}")
        if near is not None and not self.has_keys:
            raise UserError(f"{self.config.name} has no keys: there is nothing to be near to")
        pair = isinstance(near, tuple) and len(near) == 2 and isinstance(near[0], Tensor)
        if near is not None and not pair:
            raise UserError("near is a pair, such as (torch.zeros(model.key_shape), 0.1)")
        if near is not None and tuple(near[0].shape) != self.key_shape:
            raise UserError(f"a key here is {self.key_shape}, got {tuple(near[0].shape)}")

    def iterate_read(
        self, memory: Memory, cue: Images, steps: int | None, read: Callable[[Episode], Episode]
    ) -> Float[Tensor, "S *B T C H W"]:
        """Iterative reading: `read` makes a picture of the last one, at first of the cue."""
        count = as_count("steps", MOST_STEPS if steps is None else steps)
        picture, pictures = self.as_episodes(cue), []
        self.pixels.check_cue(picture)
        for _ in range(count):
            picture = read(picture)
            pictures.append(picture if memory.is_batch else picture[0])
        return torch.stack(pictures)

    # Weights are two files, model.safetensors and config.json, here and on the Hub;
    # `save_pretrained` adds a card.

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> str | None:
        """As the mixin has it, but that would begin by removing the config.json that is there.
        `options` are `push_to_hub`'s."""
        folder = Path(save_directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {folder}: {reason(error)}") from error
        self._save_pretrained(folder)
        if not (folder / "README.md").exists():
            card = self.generate_model_card(**options.get("model_card_kwargs", {}))
            write_whole(folder / "README.md", str(card))
        name = repo_id or folder.name
        return self.push_to_hub(name, **options) if push_to_hub else None

    def _save_pretrained(self, save_directory: Path) -> None:
        save_weights(self, save_directory)

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls: type[M],
        pretrained_model_name_or_path: str | Path,
        *,
        map_location: str | torch.device = "cpu",
        **options: object,
    ) -> M:
        """Load from a folder or a Hub id; the model comes in evaluation mode. `options` are
        `hf_hub_download`'s: token, revision, cache_dir, force_download, local_files_only."""
        return load_pretrained(cls, pretrained_model_name_or_path, map_location, **options)


def all_but_one(length: int, device: torch.device) -> Int[Tensor, "T rest"]:
    """Row t: the numbers of an episode's images without t."""
    if length < 2:
        raise UserError(f"leaving one image out needs an episode of at least 2, got {length}")
    rest = torch.arange(length - 1, device=device).expand(length, -1)
    return rest + (rest >= torch.arange(length, device=device)[:, None])
