"""`kpp-bits`: `kpp` with blocks that are bits, at a known cost.

    memory = model.write(images)                # lossless: images are read back exactly
    memory = memory.shrink(bits=56)             # forget by degrees: detail first, then the gist
    memory.bits                                 # bits of each stored block, in order of handle

A block has a gist, integers that describe an image, and detail, the image's first pixels in an
entropy code that is conditioned on the gist and the pixels before. `memory/gist.py` has the cost of
a gist, `memory/pixel_code.py` that of pixels, and `reads_kin.py` the density of an image that is
not stored. With e = `MISMATCH`:

    p(x | M, y) = (1 - e) 1[stored pixels match] p(rest | stored, gist) + e p(x | gist)

z is used for the sketch, the picture decoded from the gist alone: for display, for `find`, and for
a loss that keeps the gist informative. An autoregressive code alone would ignore the gist.
"""

import copy
import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kanerva.config import KppBitsConfig, ModelConfig
from kanerva.errors import UserError
from kanerva.inputs import as_count
from kanerva.memory.codec import BlockCodec
from kanerva.memory.detail import ALL, MISMATCH, Detail
from kanerva.memory.fixed_point import BIT
from kanerva.memory.gist import LARGEST, GistPrior, quantise_gist
from kanerva.memory.heap import Memory
from kanerva.memory.kin import KinReader, key_costs
from kanerva.memory.pixel_code import PixelCode
from kanerva.memory.refine import refine_gists
from kanerva.memory.writers import GistWriter
from kanerva.models.base import Handles, Images, LogWeights, PerImage, all_but_one
from kanerva.models.reads_kin import IMAGES, Kin, Known, ReadsKin
from kanerva.models.terms import ElboTerms
from kanerva.seeding import Noise, uniform
from kanerva.shapes import Blocks, Cells, Episode, FeatureMaps, KinMaps

PixelCounts = Int[Tensor, "B T n"]
_SPREAD = 2.0  # training samples beta from 1/2 to 2 times its current value
_SKETCH = 0.5  # weight of the sketch loss
_WHOLE = 0.8  # share of episodes in which whole blocks are read as images, not as gists
_SHORT = 0.15  # share of written blocks whose gist training cuts after a random part
_ALONE = 0.25  # share of images that are scored as in an empty memory
_KNOWN = 0.1  # share of written images that are scored given their gist
_FOLDS = 4  # of an episode: a written image is predicted from the written ones of other folds
_BLURRED = 0.25  # share of gists to which training adds noise instead of rounding them
_FIRST_BETA, _BETA_STEP = 0.1, 0.003  # beta starts low: an expensive gist would never be used


class KppBits(ReadsKin):
    """`kpp` with blocks of gist and detail."""

    has_code = is_exact = True
    reconstructed = "decoded from their gists"
    log_beta: Tensor

    def __init__(self, config: KppBitsConfig) -> None:
        super().__init__(config)
        code, size = config.code, self.writer.size
        self.prior = GistPrior(size - code.groups, code.groups)
        self.pixel_code = PixelCode.of(code, size, config.image)
        width = config.readout.prior_width
        self.kin = KinReader(self.encoder.features, width, self.side, code.maps + width)
        self.register_buffer("log_beta", torch.tensor(math.log(_FIRST_BETA)))
        self.cap = ALL

    def make_writer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, block: tuple[int, int, int]
    ) -> GistWriter:
        return GistWriter(block, self.encoder.features, self.side, self.config.code.groups)

    # Training

    def forward(self, episode: Episode, generator: Noise = None) -> dict[str, Tensor]:
        """The bound of independent pixels; as `auxiliary`, the cost of gists, pixels and sketches.

        Some images of each episode are not written: they are predicted from those that are (`kin`).
        The bound of about half of the written ones is predicted too, from those of other folds.
        """
        episode = self.as_episodes(episode)
        batch, length = episode.shape[:2]
        if not self._most_written(length):
            raise UserError(
                f"kpp-bits learns from images that are written and others that are not: an episode "
                f"of {length}, with memory.unwritten={self.config.memory.unwritten}, writes none"
            )
        features, groups = self.encoder(episode), self.config.code.groups
        chance = uniform((batch, length, 5), generator, self.device)
        rate = 2 * chance[..., 0] - 1
        numbers = self.writer.numbers(features, rate)
        noise = uniform(tuple(numbers.shape), generator, self.device) - 0.5
        # Most gists are rounded, as when writing. Some get noise instead: a number that is always
        # rounded to zero carries no information, so it would get no gradient and stay zero.
        blurred = (numbers + noise).clamp(-LARGEST, LARGEST)
        gists = torch.where(chance[..., 3:4] < _BLURRED, blurred, quantise_gist(numbers))
        written = self._choose_written(batch, length, generator)
        first = slice(self._most_written(length))  # images after these are never written
        some = 1 + (chance[..., 1] * (groups - 1)).floor()
        kept = torch.where(chance[..., 2] < _SHORT, some, groups) * written
        blocks = self.writer.blocks(gists, kept)
        # by episode: a memory is usually shrunk as a whole, or not at all
        whole = (kept == groups) & (uniform((batch, 1), generator, self.device) < _WHOLE)
        known = written & (chance[..., 4] < _KNOWN)
        asks = ~known & (chance[..., 4] < 1 - _ALONE)
        kin = self._ask_in_folds(blocks, features, whole, written, asks)
        for_code, for_z = self._split_kin(kin)
        for_code = for_code * ~written[..., None, None, None]  # these have a gist
        own = blocks * known[..., None, None, None]  # else zeros, as in an empty memory
        reading = self.readout(own, features, beside=for_z, generator=generator)
        likelihood = self.log_likelihood(reading.readout, episode)
        price = self.prior.nats(numbers.flatten(0, 1), blurred.flatten(0, 1))
        beta = self._adapt_beta(price.sum(dim=-1)) * _SPREAD**rate
        held = torch.arange(groups, device=self.device) < kept[..., None]
        price = (price.unflatten(0, (batch, length)) * held).sum(dim=-1)
        means = self.readout(blocks[:, first], sample=False).readout
        log_p = self.likelihood.log_prob(self.decoder(means), episode[:, first])
        sketch = -(log_p * written[:, first]).sum() / written.numel()
        pixels = self.pixel_code.mean_nats(blocks.flatten(2), episode[:, :, 0], for_code)
        key = key_costs(written.sum(dim=1), written)
        terms = ElboTerms(likelihood, reading.kl, key.to(likelihood.dtype))
        auxiliary = (beta * price).mean() + pixels + _SKETCH * sketch
        return terms.by_name() | {"auxiliary": auxiliary}

    def _ask_in_folds(
        self, blocks: Blocks, features: FeatureMaps, whole: Known, written: Known, asks: Known
    ) -> KinMaps:
        """Predict the images that ask from those that are written; one that is written itself from
        those of other folds. Zeros for images that do not ask."""
        length = written.shape[1]
        fold = torch.arange(length, device=self.device) % _FOLDS
        memories = [written, *(written & (fold != number) for number in range(_FOLDS))]
        first = slice(self._most_written(length))
        read = [part[:, first] for part in (blocks, features, whole)]
        read.append(torch.stack(memories, dim=1)[:, :, first].flatten(0, 1))
        found = self.ask_kin(*read).unflatten(0, (-1, len(memories)))
        asked = torch.where(written, 1 + fold, 0).masked_fill(~asks, -1)
        each = [
            found[:, None, number] * (asked == number)[..., None, None, None]
            for number in range(len(memories))
        ]
        return torch.stack(each).sum(dim=0)

    @torch.no_grad()
    def _adapt_beta(self, price: Float[Tensor, " N"]) -> Tensor:
        """Return beta, the weight of the gists' cost in the loss, and then raise it if gists take
        more than `gist_bits` bits, else lower it. A fixed beta ends with gists of no bits or of too
        many."""
        beta = self.log_beta.exp()
        excess = price.mean() / (math.log(2) * self.config.code.gist_bits) - 1
        self.log_beta += _BETA_STEP * excess.clamp(-1, 1)
        self.log_beta.clamp_(-4, 4)
        return beta

    def _most_written(self, length: int) -> int:
        return length - max(1, round(self.config.memory.unwritten * length))

    def _choose_written(self, batch: int, length: int, generator: Noise) -> Bool[Tensor, "B T"]:
        """Which images are written: a prefix of each episode, of any length from 1 with the same
        probability: a reader that is trained on one or two images reads several poorly."""
        most = self._most_written(length)
        count = 1 + (most * uniform((batch, 1), generator, self.device)).floor().clamp(max=most - 1)
        return torch.arange(length, device=self.device) < count

    # Write

    def blocks(self, episode: Episode, features: FeatureMaps, generator: Noise = None) -> Blocks:
        """Compute blocks with whole, refined gists, at the middle `rate`."""
        gists = self._gists(features).flatten(0, 1)
        refined = refine_gists(self.prior, self.pixel_code, gists, episode.flatten(0, 2))
        return self._whole_blocks(refined.unflatten(0, episode.shape[:2]))

    def quick_blocks(self, features: FeatureMaps) -> Blocks:
        """The same without refining: many times faster, at the cost of a few bits."""
        return self._whole_blocks(self._gists(features))

    def _gists(self, features: FeatureMaps) -> Float[Tensor, "B T numbers"]:
        rate = torch.zeros(features.shape[:2], device=self.device)
        return quantise_gist(self.writer.numbers(features, rate))

    def _whole_blocks(self, gists: Float[Tensor, "B T numbers"]) -> Blocks:
        kept = torch.full(gists.shape[:2], self.config.code.groups, device=self.device)
        return self.writer.blocks(gists, kept)

    @torch.no_grad()
    def code(self, episode: Episode, blocks: Blocks) -> Detail:
        """The detail of these images' blocks, up to the model's cap, with its costs."""
        return self.code_and_counts(episode, blocks)[0]

    @torch.no_grad()
    def code_and_counts(self, episode: Episode, blocks: Blocks) -> tuple[Detail, PixelCounts]:
        """The same as `code`, and the counts that pixels are coded with."""
        lead = episode.shape[:2]
        traces, pixels = blocks.flatten(2).flatten(0, 1), episode.flatten(0, 2)
        gist_costs = self.prior.costs(traces[:, : self.prior.numbers])
        counts = self.pixel_code.table(traces, pixels)
        costs = self.pixel_code.cost(counts, pixels.flatten(1))
        caps = torch.full(lead, self.cap, device=self.device)
        total = gist_costs.sum(dim=-1) + costs.sum(dim=-1)
        if self.cap == ALL and int(total.max()) >= BIT * ALL:
            raise UserError(f"an image takes more than {ALL} bits: write with a cap, within(bits)")
        detail = Detail(
            pixels.flatten(1).to(torch.uint8).unflatten(0, lead),
            costs.unflatten(0, lead),
            gist_costs.unflatten(0, lead),
            torch.full_like(caps, ALL),
        ).within(caps)
        return detail, counts.unflatten(0, lead)

    def encode_blocks(
        self, episode: Episode, features: FeatureMaps, generator: Noise
    ) -> tuple[Blocks, Detail]:
        blocks = self.blocks(episode, features)
        detail = self.code(episode, blocks)
        return detail.cut(blocks), detail

    def _empty(self, batch: int) -> Memory:
        code, memory = self.config.code, super()._empty(batch)
        pixels = self.config.image[1] * self.config.image[2]
        slots = self.config.memory.capacity
        detail = Detail.empty(batch, slots, code.groups, pixels, self.device)
        return replace(memory, detail=detail, codec=self.codec)

    @property
    def codec(self) -> BlockCodec:
        """The codec of files with this model's memories."""
        name = self.block_fingerprint()
        return BlockCodec(self.prior, self.pixel_code, name, self.fresh_block_fingerprint)

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
        """-ln p(x | M, y) and the key's cost. Nothing is sampled, so there is no KL z.

        In a given memory, image t reads the block of `handles[t]`. Without handles it reads the
        block whose sketch explains it best or, if that is better, is scored as new.
        """
        if memory is None and handles is not None:
            raise UserError("handles need the memory that they belong to: pass it too")
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
            terms = new.where((new.nll_nats < held.nll_nats) | nothing, held)
        return terms if images.ndim == 5 else terms[0]

    @torch.no_grad()
    def validation_terms(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """The total code length of an image, in nats: the bits of its gist (as `readout_kl`), its
        pixels given the gist, and its key. The bound cannot select a checkpoint: everything is
        stored, so it is about the same for all of them."""
        episode = self.as_pixels(images)
        gists = self._gists(self.encoder(episode))  # unrefined: refining would take longest
        costs = self.prior.costs(gists.flatten(0, 1)).sum(dim=-1)
        bits = costs.double().unflatten(0, episode.shape[:2]) / BIT
        score = self._log_pixels(self._whole_blocks(gists), episode).sum(dim=-1)
        held = torch.full((len(score),), episode.shape[1], device=self.device)
        key = key_costs(held, torch.ones_like(score, dtype=torch.bool))
        return ElboTerms(score, math.log(2) * bits, key)

    def _terms_at(self, memory: Memory, cells: Cells, episode: Episode) -> ElboTerms:
        """The terms of images that read these cells."""
        assert memory.detail is not None
        blocks = self.placement.grid.read(memory.map, cells)
        nats = self._log_pixels(blocks, episode)
        detail, pixels = memory.detail.at(cells), episode.flatten(2)
        stored = detail.is_stored
        matches = ((detail.pixels == pixels) | ~stored).all(dim=-1)
        rest = (nats * ~stored).sum(dim=-1) + math.log1p(-MISMATCH)
        other = nats.sum(dim=-1) + math.log(MISMATCH)
        score = torch.logaddexp(rest.masked_fill(~matches, -torch.inf), other)
        count = (memory.require_slots() >= 0).sum(dim=1)
        key = key_costs(count, torch.ones_like(matches))
        return ElboTerms(score, torch.zeros_like(score), key)

    @torch.no_grad()
    def familiarity(self, memory: Memory, images: Images) -> PerImage:
        """How much likelier an image is given the best stored block than as a new one, in nats,
        from the exact probabilities that code pixels; keys are not counted."""
        episode, batch = self.as_pixels(images), memory.as_batch()
        best = self.score_cues(memory, images).argmax(dim=-1)
        known = self._terms_at(batch, best, episode).log_likelihood
        score = known - self._terms_new(batch, episode).log_likelihood
        nothing = (batch.require_slots() < 0).all(dim=1, keepdim=True)
        score = score.masked_fill(nothing, -torch.inf).float()
        return score if images.ndim == 5 else score[0]

    @torch.no_grad()
    def left_out(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """Score each image in the memory of the rest of its episode (a control)."""
        episode = self.as_pixels(images)
        all_but_one(episode.shape[1], self.device)  # refuses episodes of one image
        self.placement.require_room(episode.shape[1])
        features = self.encoder(episode)
        blocks = self.blocks(episode, features)
        detail = self.code(episode, blocks)
        whole, cut = detail.is_stored.all(dim=-1), detail.cut(blocks)
        found = []
        for *parts, of_one in zip(cut, features, whole, episode, strict=True):
            every = self.readable(*parts)
            for some in torch.arange(len(of_one)).split(IMAGES):
                read = [self.read_groups(every.without(t), of_one[t, None]) for t in some.tolist()]
                found.append(self.terms_beside(Kin.cat(read), of_one[some, None]))
        return ElboTerms.cat(found).view(tuple(images.shape[:-3]))

    def permuted(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        memory, length = self.write(images, generator=generator), images.shape[-4]
        at = torch.arange(length, device=self.device).roll(1)
        return self.elbo(images, memory, handles=at.expand(images.shape[:-3]))

    def importance_sampler(self, episode: Episode, generator: Noise) -> LogWeights:
        """p is exact: every call returns the same weights."""
        terms = self.elbo(episode, generator=generator)
        return lambda: terms.elbo

    def storing_as(self, dtype: str) -> "KppBits":  # pyright: ignore[reportIncompatibleMethodOverride]
        if dtype != "float32":
            raise UserError(f"kpp-bits stores bits, which cannot be rounded to {dtype}")
        return self

    def within(self, bits: int | None) -> "KppBits":
        """A copy of this model that shares its weights and writes at most `bits` bits per image."""
        other = copy.copy(self)
        other.cap = ALL if bits is None else min(as_count("bits", bits, 0), ALL)
        return other

    def resized(self, config: ModelConfig) -> "KppBits":
        other = super().resized(config)
        assert isinstance(other, KppBits)
        return other.within(self.cap)
