"""`kpp`: Kanerva++ with the heap of the paper's first figure. Open this file first.

The life of a memory:

    memory = model.write(images)                # malloc: a block for each image
    memory = model.append(memory, more)         # into free cells; the rest does not change
    memory = memory.free(memory.handles[0])     # free: that block is zeroed, other handles stay
    steps = model.recall(memory, damaged)       # find by content, read
    model.familiarity(memory, images)           # nats: was this written?

Three things differ from the model as printed (`kpp_paper.py`). Every sample writes a block, made
from that sample alone, into a cell: M is the sum of the pasted blocks. Each sample has a random
cell of its own, so keys cannot collapse. And q(z | x, M, y) is a residual of the memory's
prediction, so its KL charges only for what the block does not contain. The generative side has the
same factors, p(y), p(z | M, y) and p(x | z), and sees an episode only through M.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from kanerva.config import KppConfig, ModelConfig
from kanerva.decoder import fit_outlines
from kanerva.distributions import KeyPosterior
from kanerva.errors import UserError
from kanerva.inputs import as_count
from kanerva.memory.detail import Detail
from kanerva.memory.grid import Grid
from kanerva.memory.heap import Memory, require_memory_object
from kanerva.memory.placement import Placement
from kanerva.memory.writers import BlockWriter
from kanerva.models.base import Handles, Images, all_but_one
from kanerva.models.content import terms_by_content
from kanerva.models.kpp_networks import KppNetworks
from kanerva.models.retrieval import Retrieval
from kanerva.models.terms import ElboTerms
from kanerva.readout import SpatialPrior
from kanerva.seeding import Noise, normal
from kanerva.shapes import Blocks, Cells, Episode, FeatureMaps, MemoryMap, Points


class Kpp(Retrieval, KppNetworks):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Block allocation, placed keys, a residual posterior and a spatial readout.

    Images are (T, C, H, W) or (B, T, C, H, W), on [0, 1], in the format `model.pixels`, to which
    `kanerva.prepare` converts. Pictures that are returned are expected pixels on [0, 1].

        write append get recall find familiarity generate      to use a memory
        elbo left_out permuted log_weights                      to score it, in nats
    """

    has_blocks = True
    reconstructed = "read at their own places in memory"
    config: KppConfig

    def __init__(self, config: KppConfig) -> None:
        super().__init__(config)
        memory = config.memory
        self.placement = Placement(memory.capacity, memory.size)
        block = (memory.channels, *self.placement.grid.block)
        self.writer = self.make_writer(block)
        self.add_readout_and_decoder(block, memory.outline)

    def make_writer(self, block: tuple[int, int, int]) -> BlockWriter:
        """Make f_mem, for blocks of this shape."""
        outline = self.config.image if self.config.memory.outline else None
        return BlockWriter(block, self.encoder.features, self.side, outline)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (2,)

    @property
    def replays(self) -> bool:
        """A key reads one whole cell: a stored block, or zeros."""
        return not self.has_code

    @property
    def capacity(self) -> int:
        """The number of images that a memory has room for."""
        return self.config.memory.capacity

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        return self.config.memory.shape

    def traces(self, maps: MemoryMap, keys: Points) -> Blocks:
        """The block that each key points at (Eq. 5)."""
        return self.placement.read(maps, keys)

    # Write, append

    @torch.no_grad()
    def write(self, images: Images, *, generator: Noise = None) -> Memory:
        """Write images (`model.pixels`) into a new memory, under handles 0 to T - 1."""
        episode = self.as_pixels(images)
        features = self.encoder(episode)
        batch, length = features.shape[:2]
        cells = self.placement.place(batch, length, generator, features.device)
        blocks, detail = self.encode_blocks(episode, features, generator)
        memory = self._empty(batch).malloc(blocks, cells, detail)
        memory = replace(memory, map=self.quantised(memory.map))
        return memory if images.ndim == 5 else memory[0]

    @torch.no_grad()
    def append(self, memory: Memory, images: Images, *, generator: Noise = None) -> Memory:
        """Write more images into free cells of a memory, or of each memory of a batch. Only the new
        images are encoded, and only their cells change, so the cost does not depend on how many are
        stored. A memory with fewer cells, written by the same weights, is first copied to one with
        this model's capacity; its handles do not change."""
        if require_memory_object(memory).owners is not None and memory.capacity < self.capacity:
            memory = self._enlarge(memory, generator)
        self.as_maps(memory, images)
        episode, batch = self.as_pixels(images), memory.as_batch()
        most = int((batch.require_slots() >= 0).sum(dim=1).max())
        self.placement.require_room(most + episode.shape[1])
        features = self.encoder(episode)
        blocks, detail = self.encode_blocks(episode, features, generator)
        for t in range(episode.shape[1]):  # one by one: each must see which cells are taken
            one = slice(t, t + 1)
            cells = self.placement.find_free(batch.require_slots() >= 0, 1, generator)
            bits = None if detail is None else detail.apply(lambda part, t=one: part[:, t])
            batch = batch.malloc(blocks[:, one], cells, bits)
        return batch if memory.is_batch else batch[0]

    def _enlarge(self, memory: Memory, generator: Noise) -> Memory:
        """Copy a memory with fewer cells to one with this model's capacity."""
        if memory.is_batch:
            every = [self._enlarge(memory[i], generator) for i in range(len(memory.map))]
            return Memory.stack(every)
        fewer = replace(self.config.memory, size=memory.map.shape[-1], capacity=memory.capacity)
        self.resized(replace(self.config, memory=fewer)).as_maps(memory)  # refuses other weights
        batch, bits = self._empty(1), memory.as_batch().detail
        for t in range(len(memory)):
            cell = memory.cells[None, t : t + 1]
            free = self.placement.find_free(batch.require_slots() >= 0, 1, generator)
            block = memory.grid.read(memory.map[None], cell)
            batch = batch.malloc(block, free, None if bits is None else bits.at(cell))
        handles, owners = torch.tensor([*memory.handles, -1]), batch.require_slots()  # -1: free
        return replace(batch, owners=handles.to(owners)[owners], issued=memory.issued)[0]

    def encode_blocks(
        self, episode: Episode, features: FeatureMaps, generator: Noise
    ) -> tuple[Blocks, Detail | None]:
        """The blocks of images and, if they are bits, what these hold."""
        return self.blocks(episode, features, generator), None

    def empty(self, batch: int | None = None) -> Memory:
        """Make an empty memory, or a batch of them."""
        memory = self._empty(batch or 1)
        return memory[0] if batch is None else memory

    def _empty(self, batch: int) -> Memory:
        config = self.config.memory
        return self.signed(Memory.empty(config.shape, config.capacity, batch, self.device))

    def blocks(self, episode: Episode, features: FeatureMaps, generator: Noise = None) -> Blocks:
        """Compute each sample's block, with noise while training."""
        blocks = self.writer(features, episode).float()
        if self.training and self.config.memory.noise:
            noise = normal(tuple(blocks.shape), generator, blocks.device)
            blocks = blocks + self.config.memory.noise * noise
        return blocks

    # The bound (§3.2)

    def write_episode(
        self,
        episode: Episode,
        features: FeatureMaps,
        *,
        sample: bool = True,
        generator: Noise = None,
    ) -> tuple[MemoryMap, KeyPosterior]:
        """M and q(y|.) of whole episodes. While training, the last images of each episode (a share
        `memory.unwritten`) are not written: they read zeros in a cell."""
        batch, length = features.shape[:2]
        cells = self.placement.place(batch, length, generator, features.device)
        share = self.config.memory.unwritten if self.training else 0.0
        skipped = round(share * length) or int(0 < share and length > 1)
        written = torch.arange(length, device=features.device).expand(batch, -1) < length - skipped
        blocks = self.blocks(episode, features, generator) * written[..., None, None, None]
        maps = self.quantised(self.placement.grid.paste(blocks, cells))
        free = self.config.memory.capacity - written.sum(dim=1).float()
        return maps, self.placement.posterior(cells, written, free)

    def write_maps(self, *_: object, **__: object) -> MemoryMap:
        raise NotImplementedError("see write_episode: cells and keys are assigned together")

    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        handles: Handles | None = None,
        sample: bool = True,
        generator: Noise = None,
    ) -> ElboTerms:
        """The three terms of L_T (Eq. 4), for an episode in its own memory or in a given one.

        In a given memory, image t reads the block of `handles[t]`. Without handles it reads the
        block that explains it best or, if that is better, a free cell.
        """
        if memory is None:
            if handles is not None:
                raise UserError("handles need the memory that they belong to: pass it too")
            return super().elbo(images, sample=sample, generator=generator)
        episode = self.as_pixels(images)
        features, maps = self.encoder(episode), self.as_maps(memory, images)
        if handles is not None:
            keys = self.keys_at(memory, memory.slots_of(handles, images.shape[-4]))
            terms = self.terms(episode, features, maps, keys, sample=sample, generator=generator)
        else:
            terms = terms_by_content(self, images, features, memory, sample, generator)
        return terms if images.ndim == 5 else terms[0]

    def left_out(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """Score each image in the memory of the rest of its episode, with its key in a free cell:
        the cost of an image that was not written (a control)."""
        episode = self.as_pixels(images)
        length = episode.shape[1]
        rest = all_but_one(length, episode.device)
        self.placement.require_room(length)
        features = self.encoder(episode)
        blocks = self.blocks(episode, features, generator)[:, rest].flatten(0, 1)
        cells = self.placement.place(len(blocks), length - 1, generator, features.device)
        memory = self._empty(len(blocks)).malloc(blocks, cells)  # (B T) memories of T - 1 images
        single, own = (value.flatten(0, 1)[:, None] for value in (episode, features))
        keys = self.keys_in_free_cells(memory, 1, generator)
        maps = self.quantised(memory.map)
        terms = self.terms(single, own, maps, keys, generator=generator)
        return terms.view(tuple(images.shape[:-3]))

    # Keys

    def key_posterior(self, features: FeatureMaps, maps: MemoryMap) -> KeyPosterior:
        raise NotImplementedError("a map does not show which cells are free: see keys_at")

    def keys_at(self, memory: Memory, cells: Cells) -> KeyPosterior:
        """q(y|.) of samples that read `cells`; a sample at a free cell counts as unwritten."""
        owners = memory.as_batch().require_slots()
        free = (owners < 0).sum(dim=1).float()
        return self.placement.posterior(cells, owners.gather(1, cells) >= 0, free)

    def free_cells(self, batch: int, length: int) -> Blocks:
        """The blocks of free cells, which images that are not stored read: zeros."""
        return torch.zeros(batch, length, *self.writer.shape, device=self.device)

    def keys_in_free_cells(
        self, memory: Memory, length: int, generator: Noise = None
    ) -> KeyPosterior:
        """q(y|.) of `length` samples that are not in this memory: they read a free cell. If there
        is none, q has no mass and its KL is infinite."""
        held = memory.as_batch().require_slots() >= 0
        cells = self.placement.find_free(held, length, generator)
        unwritten = torch.zeros_like(cells, dtype=torch.bool)
        return self.placement.posterior(cells, unwritten, (~held).sum(dim=1).float())

    # Read; find, get, recall and familiarity are in retrieval.py

    def read(
        self,
        memory: Memory,
        keys: Float[Tensor, "*B_T_key"] | None = None,
        *,
        handles: Handles | None = None,
    ) -> SpatialPrior:
        """p(z | M, y) at keys, or at the blocks of handles; (B, T, L), B = 1 for one episode."""
        if (keys is None) == (handles is None):
            raise UserError("say where to read: keys, or handles")
        if keys is not None:
            return self.read_maps(*self.check_keys(memory, keys))
        maps = self.as_maps(memory)
        cells = memory.slots_of(handles)
        return SpatialPrior(self.readout, self.placement.grid.read(maps, cells))

    @torch.no_grad()
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]:
        """Write images, read each at its own place, and decode the mean of p(z | M, y)."""
        episode, noise = self.as_episodes(images), torch.Generator(self.device).manual_seed(0)
        maps, keys = self.write_episode(episode, self.encoder(episode), generator=noise)
        pixels = self.likelihood.mean(self.decoder(self.read_maps(maps, keys.mean).mean))
        return pixels if images.ndim == 5 else pixels[0]

    # Other sizes, other pixels

    def as_maps(self, memory: Memory, images: Images | None = None) -> MemoryMap:
        """Check that a memory fits this model: its map, and its cells."""
        has_cells = require_memory_object(memory).owners is not None
        if has_cells and memory.capacity != self.capacity:
            raise UserError(
                f"this model's memories have {self.capacity} cells, got one of {memory.capacity}: "
                f"kanerva.load(NAME, capacity={memory.capacity}) reads it"
            )
        return super().as_maps(memory, images)

    def with_capacity(self, capacity: int) -> "Kpp":
        """A model with the same weights and memories for at least `capacity` images: blocks keep
        their shape, and the map is the smallest square of whole blocks that suffices."""
        wanted, (height, width) = as_count("capacity", capacity), self.placement.grid.block
        for rows in range(1, wanted + height * width + 1):
            size, columns = rows * height, rows * height // width
            count = rows * columns
            if count == self.capacity and count >= wanted:
                return self
            if count >= wanted and size == columns * width and Grid(count, size).rows == rows:
                memory = replace(self.config.memory, size=size, capacity=count)
                return self.resized(replace(self.config, memory=memory))
        raise UserError(f"no grid of blocks {height} x {width} has {wanted} cells or a few more")

    def resized(self, config: ModelConfig) -> "Kpp":
        """A model with the same weights and a memory of another size: any grid whose cells have the
        same shape."""
        assert isinstance(config, KppConfig)
        with torch.random.fork_rng(devices=[]):  # its initial weights are replaced at once
            other = type(self)(config)
        if other.writer.shape != self.writer.shape:
            raise UserError(
                f"a memory of side {config.memory.size} with {config.memory.capacity} cells "
                f"takes blocks {other.writer.shape}; these weights write {self.writer.shape}"
            )
        other.load_state_dict(self.state_dict())
        other.memory_dtype = self.memory_dtype
        return other.to(self.device).eval()

    def fit_to_data(self, images: Images) -> None:
        """Initialise outlines, and the linear predictions of pixels, from training images."""
        if self.writer.outline is not None and self.decoder.outline is not None:
            pixels = self.as_episodes(images).flatten(0, 1).to(self.device)
            fit_outlines(self.writer.outline, self.decoder, pixels, self.config.memory.noise)
