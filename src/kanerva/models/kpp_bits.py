"""`kpp-bits`: `kpp` whose blocks are bits, with a price for each.

    memory = model.write(images)                # everything: images come back exactly
    memory = memory.shrink(bits=56)             # forgetting by degrees: detail first, then gist
    memory.bits                                 # of each block held, in order of handle

A block has a gist, whole numbers that say what an image looks like, and detail, the image's first
pixels in an entropy code that sees the gist and the pixels before. Both are in `memory/`: what a
gist costs (`gist`), what pixels cost (`pixel_code`). An image that is not held reads all blocks at
once (`kin`).

    p(x | M, y) = (1 - e) 1[stored pixels match] p(rest | stored, gist) + e p(x | gist)

z serves the sketch: pictures, finding, and a loss that keeps the gist telling. A code that sees its
neighbours would leave it unused.
"""

import copy
import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kanerva.config import KppBitsConfig
from kanerva.errors import UserError
from kanerva.memory.codec import BlockCodec
from kanerva.memory.detail import ALL, MISMATCH, Detail
from kanerva.memory.fixed_point import BIT, TOTAL, clear_of
from kanerva.memory.gist import LARGEST, GistPrior, quantise_gist
from kanerva.memory.heap import Memory
from kanerva.memory.kin import KinReader
from kanerva.memory.pixel_code import LEVELS, PixelCode
from kanerva.memory.writers import GistWriter
from kanerva.models.base import Handles, Images, LogWeights, Near, all_but_one
from kanerva.models.kpp import Kpp
from kanerva.models.terms import ElboTerms
from kanerva.readout import SpatialPrior
from kanerva.seeding import Noise, as_generator, uniform
from kanerva.shapes import Blocks, Cells, Episode, FeatureMaps, PerImage

NEW = 0.25  # p(y = new | M), where anything is held
_SPREAD = 2.0  # training draws beta from half to twice its default
_SKETCH = 0.5  # weight of the loss that is the gist's own
_CHEAP = 1000  # steps in which the price rises: what costs from the start is never used
_SHORT = 0.25  # share of written blocks that training cuts after some group


class KppBits(Kpp):
    """Gist and detail."""

    has_code = True
    age: Tensor
    config: KppBitsConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    writer: GistWriter  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: KppBitsConfig) -> None:
        super().__init__(config)
        code, size = config.code, self.writer.size
        self.prior = GistPrior(size - code.groups, code.groups)
        self.pixel_code = PixelCode(
            size,
            config.image[1:],
            reach=code.reach,
            width=code.width,
            maps=code.maps,
            depth=code.depth,
        )
        self.kin = KinReader(size)
        self.register_buffer("age", torch.zeros(()))  # steps trained
        self.cap = ALL

    def make_writer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, block: tuple[int, int, int]
    ) -> GistWriter:
        return GistWriter(block, self.encoder.features, self.side, self.config.code.groups)

    # Training

    def forward(self, episode: Episode, generator: Noise = None) -> dict[str, Tensor]:
        """The sketch's bound; beside it the price of gists and the code of pixels.

        Some images of each episode are not written: they read what the others have in common.
        """
        episode = self.as_episodes(episode)
        batch, length = episode.shape[:2]
        features, groups = self.encoder(episode), self.config.code.groups
        chance = uniform((batch, length, 4), generator, self.device)
        rate = 2 * chance[..., 0] - 1
        numbers = self.writer.numbers(features, rate)
        noise = uniform(tuple(numbers.shape), generator, self.device) - 0.5
        # half are rounded, as they will be; half are blurred: what is rounded to zero tells a
        # network nothing, and would stay zero
        blurred = (numbers + noise).clamp(-LARGEST, LARGEST)
        gists = torch.where(chance[..., 3:] < 0.5, quantise_gist(numbers), blurred)
        written = self._choose_written(batch, length, generator)
        some = 1 + (chance[..., 1] * (groups - 1)).floor()
        kept = torch.where(chance[..., 2] < _SHORT, some, groups) * written
        blocks = self.writer.blocks(gists, kept)
        kin = self.kin(blocks.flatten(2), written).unflatten(-1, self.writer.shape)
        traces = torch.where(written[..., None, None, None], blocks, kin[:, None])
        reading = self.readout(traces, features, generator=generator)
        likelihood = self.log_likelihood(reading.readout, episode)
        price = self.prior.nats(numbers.flatten(0, 1), blurred.flatten(0, 1))
        held = torch.arange(groups, device=self.device) < kept[..., None]
        price = (price.unflatten(0, (batch, length)) * held).sum(dim=-1)
        self.age += 1
        beta = self.config.code.beta * _SPREAD**rate * (self.age / _CHEAP).clamp(max=1)
        means = self.readout(traces, sample=False).readout
        sketch = -self.likelihood.log_prob(self.decoder(means), episode) * written
        pixels = self._pixel_nats(traces, episode)
        key = self._key_costs(written.sum(dim=1), written)
        terms = ElboTerms(likelihood, reading.kl, key.to(likelihood.dtype))
        auxiliary = (beta * price + _SKETCH * sketch + pixels).mean()
        return terms.by_name() | {"auxiliary": auxiliary}

    def _choose_written(self, batch: int, length: int, generator: Noise) -> Bool[Tensor, "B T"]:
        """The first images of each episode: in half of the episodes nearly all, in the others any
        number."""
        chance = uniform((batch, 2), generator, self.device)
        most = length - max(1, round(self.config.memory.unwritten * length))
        count = torch.where(chance[:, 0] < 0.5, most, (chance[:, 1] * length).floor())
        return torch.arange(length, device=self.device) < count[:, None]

    def _key_costs(
        self, held: Int[Tensor, " B"], written: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """-ln p(y | M): new with a stated probability, else any of what is held; certain where
        nothing is."""
        held = held[:, None].double()
        new = torch.where(held > 0, -math.log(NEW), 0.0)
        return torch.where(written, held.log() - math.log(1 - NEW), new)

    def _pixel_nats(self, blocks: Blocks, episode: Episode) -> PerImage:
        """-ln p(x | gist) of every image, with gradients."""
        pixels = episode.flatten(0, 2)
        levels = self.pixel_code.levels(blocks.flatten(2).flatten(0, 1), pixels)
        with clear_of(pixels):
            nats = nn.functional.binary_cross_entropy_with_logits(
                levels / LEVELS, pixels.flatten(1), reduction="none"
            )
        return nats.sum(dim=1).unflatten(0, episode.shape[:2])

    # Write

    def blocks(self, episode: Episode, features: FeatureMaps, generator: Noise = None) -> Blocks:
        """Whole gists, at the price that bits are stored for."""
        rate = torch.zeros(episode.shape[:2], device=self.device)
        gists = quantise_gist(self.writer.numbers(features, rate))
        return self.writer.blocks(gists, torch.full_like(rate, self.config.code.groups))

    @torch.no_grad()
    def code(self, episode: Episode, blocks: Blocks) -> Detail:
        """Everything that blocks of these images could hold, with its costs."""
        lead, groups = episode.shape[:2], self.config.code.groups
        traces, pixels = blocks.flatten(2).flatten(0, 1), episode.flatten(0, 2)
        gist_costs = self.prior.costs(traces[:, : self.prior.numbers])
        counts = self.pixel_code.table(traces, pixels)
        costs = self.pixel_code.cost(counts, pixels.flatten(1))
        caps = torch.full(lead, self.cap, device=self.device)
        return Detail(
            pixels.flatten(1).to(torch.uint8).unflatten(0, lead),
            costs.unflatten(0, lead),
            gist_costs.unflatten(0, lead),
            torch.full_like(caps, groups),
            torch.full_like(caps, ALL),
        ).within(caps)

    def malloc(
        self,
        memory: Memory,
        episode: Episode,
        features: FeatureMaps,
        cells: Cells,
        generator: Noise,
    ) -> Memory:
        blocks = self.blocks(episode, features)
        detail = self.code(episode, blocks)
        gists = blocks.flatten(2)[..., : self.prior.numbers]
        return memory.malloc(self.writer.blocks(gists, detail.kept), cells, detail)

    def _empty(self, batch: int) -> Memory:
        code, memory = self.config.code, super()._empty(batch)
        pixels = self.config.image[1] * self.config.image[2]
        slots = self.config.memory.capacity
        detail = Detail.empty(batch, slots, code.groups, pixels, self.device)
        return replace(memory, detail=detail, codec=self.codec)

    @property
    def codec(self) -> BlockCodec:
        """What reads and writes files of this model's memories."""
        return BlockCodec(self.prior, self.pixel_code, self.fingerprint)

    # The bound

    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        handles: Handles | None = None,
        sample: bool = True,
        generator: Noise = None,
    ) -> ElboTerms:
        """-ln p(x | M, y) and the key's cost; p is exact, so there is no KL z.

        In a memory given, image t is looked for where `handles[t]` lies; without handles by
        content, in the block whose sketch explains it best or, if that is better, as new.
        """
        if memory is None and handles is not None:
            raise UserError("handles are those of a memory: give it too")
        episode = self.as_pixels(images)
        if memory is None:
            memory = self.write(images, generator=generator)
            handles = torch.arange(episode.shape[1], device=self.device).expand(len(episode), -1)
        self.as_maps(memory, images)
        batch = memory.as_batch()
        if handles is not None:
            terms = self._terms_at(batch, batch.slots_of(handles, images.shape[-4]), episode)
        else:
            best = self.score_cues(memory, images).argmax(dim=-1)
            held, new = self._terms_at(batch, best, episode), self._terms_new(batch, episode)
            nothing = (batch.require_slots() < 0).all(dim=1, keepdim=True)
            choose = (new.nll_nats < held.nll_nats) | nothing
            pairs = zip(new.by_name().values(), held.by_name().values(), strict=True)
            terms = ElboTerms(*[torch.where(choose, *pair) for pair in pairs])
        return terms if images.ndim == 5 else terms[0]

    @torch.no_grad()
    def validation_terms(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """The whole code length of an image: its gist's bits, here in the place of KL z, its pixels
        given the gist, its key. With everything stored the bound itself says nothing."""
        episode = self.as_pixels(images)
        blocks = self.blocks(episode, self.encoder(episode))
        gists = blocks.flatten(2).flatten(0, 1)[:, : self.prior.numbers]
        bits = self.prior.costs(gists).sum(dim=-1).double().unflatten(0, episode.shape[:2]) / BIT
        score = self._log_pixels(blocks, episode).sum(dim=-1)
        key = torch.full_like(score, math.log(episode.shape[1]) - math.log(1 - NEW))
        return ElboTerms(score, math.log(2) * bits, key)

    def _terms_at(self, memory: Memory, cells: Cells, episode: Episode) -> ElboTerms:
        """Of images that are looked for in these cells."""
        assert memory.detail is not None
        blocks = self.placement.grid.read(memory.map, cells)
        nats = self._log_pixels(blocks, episode)
        detail, pixels = memory.detail.at(cells), episode.flatten(2)
        stored = torch.arange(nats.shape[-1], device=nats.device) < detail.stored[..., None]
        matches = ((detail.pixels == pixels) | ~stored).all(dim=-1)
        rest = (nats * ~stored).sum(dim=-1) + math.log1p(-MISMATCH)
        other = nats.sum(dim=-1) + math.log(MISMATCH)
        known = torch.logaddexp(rest.masked_fill(~matches, -torch.inf), other)
        score = torch.where(detail.stored > 0, known, nats.sum(dim=-1))
        count = (memory.require_slots() >= 0).sum(dim=1)
        key = self._key_costs(count, torch.ones_like(matches))
        return ElboTerms(score, torch.zeros_like(score), key)

    def _terms_new(self, memory: Memory, episode: Episode) -> ElboTerms:
        """Of images that are not in a memory: they read all that it holds."""
        traces = self._read_kin(memory)[:, None].expand(-1, episode.shape[1], -1, -1, -1)
        score = self._log_pixels(traces, episode).sum(dim=-1)
        count = (memory.require_slots() >= 0).sum(dim=1)
        key = self._key_costs(count, torch.zeros_like(score, dtype=torch.bool))
        return ElboTerms(score, torch.zeros_like(score), key)

    def _read_kin(self, memory: Memory) -> Float[Tensor, "B Cm h w"]:
        """The trace that a new image reads."""
        held = memory.require_slots() >= 0
        every = torch.arange(held.shape[1], device=self.device).expand(len(held), -1)
        blocks = self.placement.grid.read(memory.map, every)
        return self.kin(blocks.flatten(2), held).unflatten(-1, self.writer.shape)

    def _log_pixels(self, blocks: Blocks, episode: Episode) -> Float[Tensor, "B T n"]:
        """ln p of every pixel given the gist and the pixels before it, from the very tables that
        code it."""
        pixels = episode.flatten(0, 2)
        counts = self.pixel_code.table(blocks.flatten(2).flatten(0, 1), pixels)
        share = torch.where(pixels.flatten(1) > 0.5, counts, TOTAL - counts).double() / TOTAL
        return share.log().unflatten(0, episode.shape[:2])

    @torch.no_grad()
    def left_out(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """Each image scored in the memory of the rest of its episode (a control)."""
        episode = self.as_pixels(images)
        rest = all_but_one(episode.shape[1], self.device)
        self.placement.require_room(episode.shape[1])
        blocks = self.blocks(episode, self.encoder(episode))[:, rest].flatten(0, 1)
        places = torch.arange(rest.shape[1], device=self.device).expand(len(blocks), -1)
        memory = super()._empty(len(blocks)).malloc(blocks, places)
        terms = self._terms_new(memory, episode.flatten(0, 1)[:, None])
        return terms.view(tuple(images.shape[:-3]))

    # Generate

    @torch.no_grad()
    def generate(
        self,
        memory: Memory | None,
        num_samples: int,
        *,
        near: Near | None = None,
        sample_pixels: bool = False,
        generator: Noise = None,
    ) -> Float[Tensor, "*B T C H W"]:
        """New images like what is held: z from p(z | M, new), decoded to expected pixels; or, with
        `sample_pixels`, pixels one after another from the code. `near=(key, spread)` reads blocks
        around a key instead."""
        memory = self.require_memory(memory)
        self.check_samples(num_samples, near)
        self.as_maps(memory)
        if near is not None:
            return super().generate(
                memory, num_samples, near=near, sample_pixels=sample_pixels, generator=generator
            )
        kin = self._read_kin(memory.as_batch())[:, None]
        traces = kin.expand(-1, num_samples, -1, -1, -1)
        if sample_pixels:
            images = self._sample_code(traces, generator)
        else:
            readout = SpatialPrior(self.readout, traces).sample(generator)
            images = self.likelihood.mean(self.decoder(readout))
        return images if memory.is_batch else images[0]

    def _sample_code(self, traces: Blocks, generator: Noise) -> Episode:
        """A draw of every pixel in turn."""
        noise = as_generator(generator)

        def draw(_: int, counts: Int[Tensor, " N"]) -> Tensor:
            chance = torch.rand(counts.shape, generator=noise, device=counts.device)
            return chance < counts / TOTAL

        pixels = self.pixel_code.follow(traces.flatten(2).flatten(0, 1), draw)
        return pixels[:, None].unflatten(0, traces.shape[:2])

    def permuted(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        memory, length = self.write(images, generator=generator), images.shape[-4]
        at = torch.arange(length, device=self.device).roll(1)
        return self.elbo(images, memory, handles=at.expand(images.shape[:-3]))

    def importance_sampler(self, episode: Episode, generator: Noise) -> LogWeights:
        """There is nothing to draw: p is exact."""
        terms = self.elbo(episode, generator=generator)
        return lambda: terms.elbo

    def storing_as(self, dtype: str) -> "KppBits":  # pyright: ignore[reportIncompatibleMethodOverride]
        if dtype != "float32":
            raise UserError(f"kpp-bits holds bits, which cannot be rounded to {dtype}")
        return self

    def within(self, bits: int | None) -> "KppBits":
        """This model, sharing its weights, with memories shrunk to so many bits when written."""
        other = copy.copy(self)
        other.cap = ALL if bits is None else bits
        return other
