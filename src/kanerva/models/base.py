"""MemoryModel, the interface of every model: verbs, capabilities, and checks of users' inputs."""

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
Near = tuple[Float[Tensor, "*key"], float]  # a key, and the standard deviation around it
Handles = Int[Tensor, "*B T"] | Sequence[int]
LogWeights = Callable[[], PerImage]  # each call samples latents and returns their log-weights
MOST_STEPS = 10  # ours: steps of an iterative read, by default
MOST_NUMBERS = 2**26  # pixels times channels that `generate` makes at once
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
    (T, C, H, W) or a batch (B, T, C, H, W). Results have the same batch dimension as the input.

    Everything random takes a `generator`; by default it is torch's global one.
    """

    decoder: nn.Module  # from readouts to parameters of the likelihood
    config: ModelConfig

    # Capabilities: callers test these instead of the class
    remembers = True  # False: there is no memory, and `write` raises an error
    recalls = True  # False: nothing can be found by a cue, and `recall` raises an error
    has_keys = True  # False: there are no keys, and `generate(near=...)` raises an error
    has_blocks = False  # True: each image has its own block, with a handle and a place
    has_code = False  # True: blocks are bits, whose number is known once they are written
    is_exact = False  # True: the bound is -ln p itself, without sampling
    has_memory_kl = False  # True: there is a distribution over memories; `memory_kl` is its KL
    writes_sequentially = False  # True: images are written in a loop, which is not compiled
    reconstructed = "reconstructed"  # the label of pictures that `reconstruct` makes

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.likelihood = make_likelihood(config.likelihood)
        self.memory_dtype = "float32"  # whole episodes are rounded to it: `write` and scores

    def storing_as(self: M, dtype: str) -> M:
        """This model, with memories rounded to `dtype` when they are written as a whole."""
        other = copy.copy(self)
        other.memory_dtype = dtype
        return other

    def __repr__(self) -> str:
        """One line; parts of the network, such as `model.decoder`, print as usual in torch."""
        about = f"{self.config.name}: images {self.pixels}"
        if self.remembers:
            about += f"; memory {'x'.join(map(str, self.memory_shape(0)))}"
        weights = sum(weight.numel() for weight in self.parameters())
        return f"{type(self).__name__}({about}; {weights:,} parameters, on {self.device})"

    @property
    def replays(self) -> bool:
        """Whether `generate` mostly returns stored images instead of new, similar ones."""
        return False

    # The size of a memory

    @abstractmethod
    def memory_shape(self, length: int) -> tuple[int, int, int]:
        """The shape of one episode's memory with `length` images: all that p reads of them."""

    def memory_bits(self, length: int, dtype: str = "float32") -> float:
        """The bits of one episode's memory with `length` images, stored as `dtype`."""
        return float(bits(math.prod(self.memory_shape(length)), dtype))

    def memory_kl(self, images: Images, *, generator: Noise = None) -> PerImage:
        """KL[q(M|X) || p(M)] / T for each image, if the model has a distribution over memories."""
        raise UserError(f"{self.config.name} has no distribution over memories")

    @property
    def readout_shapes(self) -> list[list[int]]:
        """The shape of each part of z."""
        return [[self.config.readout.size]]  # pyright: ignore[reportAttributeAccessIssue]

    @property
    @abstractmethod
    def key_shape(self) -> tuple[int, ...]:
        """The shape of one sample's key, whose prior is N(0, 1)."""

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
        """p(z | M, y) at keys, or at the blocks of handles; (B, T, L), B = 1 for one episode."""

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
        """Write more images into a memory, if the model supports it."""
        raise UserError(f"{self.config.name} writes its memory as a whole: nothing can be appended")

    def familiarity(self, memory: Memory, images: Images) -> PerImage:
        """How much better a memory explains an image than no memory, in nats, if the model can."""
        raise UserError(f"{self.config.name} cannot tell what its memory holds")

    def get(self, memory: Memory, handles: Handles | None = None) -> Float[Tensor, "*B T C H W"]:
        """Decode stored images by handle, if the model has blocks."""
        raise UserError(f"{self.config.name} writes its memory as a whole: there are no handles")

    def find(self, memory: Memory, cue: Shaped[Tensor, "*T C H W"], **options: Any) -> Any:
        """Find which stored image a cue shows, with probabilities, if the model can: `Kpp.find`."""
        raise UserError(f"{self.config.name} writes its memory as a whole: none can be picked out")

    def resized(self: M, config: ModelConfig) -> M:
        """A model with the same weights and a memory of another size, if the model can."""
        raise UserError(f"{self.config.name} cannot be scored in a memory of another size")

    def with_capacity(self: M, capacity: int) -> M:
        """A model with the same weights and room for more images, if the model has blocks."""
        raise UserError(f"{self.config.name} writes its memory as a whole: it has no capacity")

    def fit_to_data(self, images: Images) -> None:
        """Initialise from training images before the first step; most models do nothing here."""

    def signed(self, memory: Memory) -> Memory:
        """Mark a memory as written by this model: other models refuse to read it."""
        return replace(memory, writer=self.fingerprint())

    # Training and scores

    def forward(self, episode: Episode, generator: Noise = None) -> dict[str, Tensor]:
        """The training objective: `ElboTerms` as a dict, because the wrappers that distribute a
        module over devices find tensors in plain containers only. `auxiliary`, if there is one, is
        a loss that is minimised in addition; no reported figure includes it."""
        return self.elbo(episode, generator=generator).by_name()

    def validation_terms(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """The terms that select the best checkpoint: the bound, unless a model overrides this."""
        return self.elbo(images, generator=generator)

    @abstractmethod
    def importance_sampler(self, episode: Episode, generator: Noise) -> LogWeights:
        """Write an episode once. Each call of the result samples latents: their log-weights."""

    def log_weights(
        self, images: Images, samples: int, *, generator: Noise = None
    ) -> Float[Tensor, "samples *B T"]:
        """ln p(x, latents | M) - ln q(latents | X) of several samples of the latents, with M fixed.
        Their log-mean-exp is the IWAE bound."""
        as_count("samples", samples)
        draw = self.importance_sampler(self.as_pixels(images), generator)
        weights = torch.stack([draw() for _ in range(samples)])
        return weights if images.ndim == 5 else weights[:, 0]

    def sample_pixels(self, readout: Readout, generator: Noise = None) -> Episode:
        """Sample pixels from p(x | z)."""
        return self.likelihood.sample(self.decoder(readout), as_generator(generator))

    def quantised(self, maps: Float[Tensor, "B Cm Hm Wm"]) -> Float[Tensor, "B Cm Hm Wm"]:
        """Round memories to `memory_dtype`."""
        plain = self.memory_dtype == "float32" or maps.numel() == 0  # 0: there is no memory
        return maps if plain else quantise(maps, self.memory_dtype)

    # Checks of users' inputs

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def pixels(self) -> PixelFormat:
        """The format of the images that this model writes and scores."""
        return PixelFormat(self.config.image, self.config.likelihood == "bernoulli")

    def as_episodes(self, images: Images) -> Episode:
        """Check images or cues and add a batch dimension if there is none."""
        is_step = self.training and torch.is_grad_enabled()  # skips images whose loss is not finite
        return self.pixels.as_episodes(images, finite=not is_step)

    def as_pixels(self, images: Images) -> Episode:
        """`as_episodes` for images that will be written or scored. Outside training, also check
        that the likelihood covers their pixel values."""
        episode = self.as_episodes(images)
        if not self.training:
            self.likelihood.check(episode)
        return episode

    def as_maps(self, memory: Memory, images: Images | None = None) -> Float[Tensor, "B Cm Hm Wm"]:
        """Check that a memory fits this model, and the images if any; return its map as a batch."""
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
        """Refuse the map of a memory that another kind of model wrote."""
        if shape != (expected := self.memory_shape(0)):
            raise UserError(f"this model's memories are {expected}, got {shape}")

    def check_keys(
        self, memory: Memory, keys: Float[Tensor, "*B_T_key"]
    ) -> tuple[Float[Tensor, "B Cm Hm Wm"], Float[Tensor, "B T *key"]]:
        """Check keys; return a memory's map and its keys as batches. For one episode, keys may have
        a batch dimension or not."""
        if not isinstance(keys, Tensor):
            raise UserError(f"keys are a tensor (T, *{self.key_shape}), got {type(keys).__name__}")
        maps, shape = self.as_maps(memory), tuple(keys.shape)
        keys = keys if keys.ndim == 2 + len(self.key_shape) else keys[None]
        if keys.ndim < 2 or len(keys) != len(maps) or tuple(keys.shape[2:]) != self.key_shape:
            raise UserError(f"keys {shape} do not fit memory {tuple(maps.shape)}")
        return maps, keys.to(maps)

    def require_memory(self, memory: Memory | None) -> Memory:
        """Refuse None. A model without a memory takes only None, for which it gets a blank one."""
        if not self.remembers:
            if memory is not None:
                raise UserError(f"{self.config.name} has no memory: pass None")
            return Memory(torch.zeros(self.memory_shape(0), device=self.device))
        if memory is None:
            raise UserError(f"{self.config.name} generates from a memory: write one first")
        return require_memory_object(memory)

    def check_samples(self, num_samples: int, near: Near | None) -> None:
        """Refuse arguments that `generate` cannot serve."""
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
        """Read iteratively: apply `read` to the cue, then to each result; return every step."""
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
        """Override of the mixin's method, which would first delete an existing config.json.
        `options` are those of `push_to_hub`."""
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
        """Load from a folder or a Hub id, in evaluation mode. `options` are those of
        `hf_hub_download`: token, revision, cache_dir, force_download, local_files_only."""
        return load_pretrained(cls, pretrained_model_name_or_path, map_location, **options)


def all_but_one(length: int, device: torch.device) -> Int[Tensor, "T rest"]:
    """Row t has the indices of an episode's images without t."""
    if length < 2:
        raise UserError(f"leaving one image out needs an episode of at least 2, got {length}")
    rest = torch.arange(length - 1, device=device).expand(length, -1)
    return rest + (rest >= torch.arange(length, device=device)[:, None])
