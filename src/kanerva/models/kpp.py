"""`kpp`: Kanerva++ with the heap of its first figure made real.

A memory's life:

    memory = model.write(images)                # malloc: each image its own block
    memory = model.append(memory, more)         # into free places; the rest is untouched
    memory = memory.free(memory.handles[0])     # free: that block is gone, handles stay
    steps = model.recall(memory, damaged)       # found by content, read back
    model.familiarity(memory, images)           # nats: was this written?

Three things differ from the model as printed (`kanerva_plus_plus.py`). Every sample writes a block
made from itself alone, pasted where its key lies: M is a sum of blocks. Its key is dealt or matched
to a place of its own, so keys cannot collapse. And q(z | x, M, y) is a residual of the memory's own
prediction, so it pays only for what a block does not tell. The generative side is as before: p(y),
p(z | M, y), p(x | z), and sees an episode through M only.
"""

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.config import ModelConfig
from kanerva.decoder import SpatialDecoder
from kanerva.distributions import DiagonalNormal, as_normal, mapped
from kanerva.encoder import SampleEncoder, quarter
from kanerva.errors import UserError
from kanerva.memory.heap import Memory, Slots
from kanerva.memory.placement import KeyPosterior, Placer, Places, locality_loss
from kanerva.memory.writers import BlockAllocator
from kanerva.models.base import ElboTerms, Images, JointDensity, MemoryModel, Weigh, all_but_one
from kanerva.readout import SpatialReadout, before_tanh
from kanerva.seeding import normal, stream
from kanerva.shapes import Blocks, Episode, FeatureMaps, MemoryMap, PerImage, Points, Readout

Observed = Float[Tensor, "*B T H W"]

_ENOUGH = 2**20  # pixels to learn a linear guess from


@dataclass(frozen=True)
class Addressed:
    """How well each slot's block explains each cue: ln p(cue | that block), -inf where free."""

    log_likelihood: Float[Tensor, "B T slots"]

    @property
    def slots(self) -> Int[Tensor, "B T"]:
        """The slot that explains a cue best."""
        return self.log_likelihood.argmax(dim=-1)


class Kpp(MemoryModel):
    """Block allocation, placed keys, a residual posterior and a spatial readout."""

    reconstructed = "read at their own places in memory"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        side = (quarter(height), quarter(width))
        self.encoder = SampleEncoder(config.encoder, channels)
        features = self.encoder.features
        self.placer = Placer(config.memory, config.keys, features, side)
        image, outline = config.image, config.memory.outline
        self.writer = BlockAllocator(config.memory, features, side, self.placer.block, image)
        trace = self.writer.shape
        self.readout = SpatialReadout(config.readout, trace, features, side, outline)
        self.decoder = SpatialDecoder(
            config.decoder, config.readout, self.likelihood, image, prod(trace) if outline else 0
        )

    @torch.no_grad()
    def measure(self, images: Images) -> None:
        """An outline's numbers are told in units of what is usual, and where pixels see their
        neighbours they start from the best linear guesses, given outlines and without."""
        pixels = self.as_episodes(images).flatten(0, 1).to(self.device)
        decoder = cast(SpatialDecoder, self.decoder)
        if self.writer.outline is None or decoder.outline is None:
            return
        if len(pixels) < 2:
            raise UserError("what is usual cannot be measured on one image")
        for outline in (self.writer.outline, decoder.outline):
            outline.measure(pixels)
        if decoder.near is not None:
            pixels = pixels[:: ceil(pixels[:, 0].numel() / _ENOUGH)]
            blocks = self.writer.outline(pixels).tanh()
            noise = stream("measure", device=blocks.device)
            drawn = torch.randn(blocks.shape, generator=noise, device=blocks.device)
            expected = decoder.outline(before_tanh(blocks + self.config.memory.noise * drawn))
            nothing = decoder.outline(torch.zeros_like(blocks[:1]))
            decoder.near.measure(expected, nothing, pixels)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (2,)

    def traces(self, maps: MemoryMap, keys: Points) -> Blocks:
        """The block each key points at (Eq. 5)."""
        return self.placer.read(maps, keys)

    # The bound (§3.2)

    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        handles: Int[Tensor, "*B T"] | list[int] | None = None,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> ElboTerms:
        """The three terms of L_T (Eq. 4): of an episode in its own memory, or in another.

        In a memory given, image t is looked for where `handles[t]` lies; without handles by
        content, in the block that explains it best or, if that is better, in a free place.
        """
        episode = self.as_pixels(images)
        maps = self.encoder(episode)
        if memory is None:
            if handles is not None:
                raise UserError("handles are those of a memory: give it too")
            map, keys = self.write_episode(episode, maps, generator)
        elif handles is not None:
            map = self.as_maps(memory, images)
            at = torch.as_tensor(handles, device=self.device).view(-1, images.shape[-4])
            keys = self.keys_at(memory, self._slots_of(memory, at), maps)
        else:
            terms = self._by_content(images, episode, maps, memory, sample, generator)
            return terms if images.ndim == 5 else terms[0]
        terms = self.terms(episode, maps, map, keys, sample=sample, generator=generator)
        return terms if images.ndim == 5 else terms[0]

    def terms(
        self,
        episode: Episode,
        maps: FeatureMaps,
        memory: MemoryMap,
        keys: KeyPosterior,
        *,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> ElboTerms:
        """L_T from its parts: one key sample serves z's prior, its posterior and the decoder."""
        y = keys.sample(generator) if sample else keys.mean
        traces = self.traces(memory, y)
        reading = self.readout(traces, maps, sample=sample, generator=generator)
        return ElboTerms(
            log_likelihood=self.log_likelihood(reading.readout, episode),
            readout_kl=reading.kl,
            key_kl=keys.kl_to_prior(),
        )

    def log_likelihood(self, readout: Readout, episode: Episode) -> PerImage:
        """ln p(x | z); a product over pixels, each given those before it, where a decoder sees
        neighbours."""
        return self.likelihood.log_prob(self.decoder(readout, episode), episode)

    def draw_pixels(self, readout: Readout, generator: torch.Generator | None = None) -> Episode:
        """Pixels of p(x | z): one after another, where they see their neighbours."""
        return cast(SpatialDecoder, self.decoder).draw(readout, generator)

    def forward(self, episode: Episode) -> dict[str, Tensor]:
        """The training objective. Beside it, where pixels see their neighbours, what a sketch
        without them costs that is made of the memory alone: neighbours tell so much so soon that it
        would be left unused. Its z is drawn from p(z | M, y), as q's are: at means the decoder
        would learn to tell the two apart by their noise, and sketch in one case only. And what puts
        like beside like, a loss of the key network alone."""
        episode = self.as_episodes(episode)
        maps = self.encoder(episode)
        alone = self.config.memory.locality > 0
        proposal = self.placer.propose(maps.detach() if alone else maps)
        memory, keys = self.write_episode(episode, maps, proposal=proposal)
        outputs, beside = self.terms(episode, maps, memory, keys).by_name(), []
        if self.config.decoder.neighbours:
            drawn = self.readout(self.traces(memory, keys.mean)).readout
            loss = -self.likelihood.log_prob(self.decoder(drawn), episode).mean()
            beside.append(self.config.decoder.sketch * loss)
        if alone and proposal is not None:
            loss = locality_loss(proposal.mean, episode)
            beside.append(self.config.memory.locality * loss)
        return outputs | ({"auxiliary": sum(beside[1:], beside[0])} if beside else {})

    # Write, append

    def write_episode(
        self,
        episode: Episode,
        maps: FeatureMaps,
        generator: torch.Generator | None = None,
        *,
        proposal: DiagonalNormal | None = None,
    ) -> tuple[MemoryMap, KeyPosterior]:
        """M and q(y|.) of whole episodes. While training, a share of each is left unwritten: it
        has a place, and finds nothing there. A share of one makes a VAE of the same size, which
        never writes anything."""
        batch, length = maps.shape[:2]
        proposal = proposal or self.placer.propose(maps)
        places = self.placer.place(proposal, batch, length, maps.device, generator)
        share = self.config.memory.unwritten
        left = round(share * length) or int(0 < share and length > 1)
        if not self.training and share < 1:
            left = 0
        written = torch.arange(length, device=maps.device).expand(batch, -1) < length - left
        blocks = self._blocks(episode, maps) * written[..., None, None, None]
        memory = self.placer.paste(blocks, places)
        empty = self.config.memory.capacity - written.sum(dim=1).float()
        return self.settled(memory), self.placer.posterior(places, proposal, written, empty)

    def _blocks(self, episode: Episode, maps: FeatureMaps) -> Float[Tensor, "B T Cm h w"]:
        """Each sample's block; with noise while training, and nothing for a VAE."""
        blocks = self.writer(maps, episode).float()
        if self.training and self.config.memory.noise:
            noise = normal(tuple(blocks.shape), None, blocks.device)
            blocks = blocks + self.config.memory.noise * noise
        return blocks * 0 if self.config.memory.unwritten == 1 else blocks

    @torch.no_grad()
    def write(self, images: Images, *, generator: torch.Generator | None = None) -> Memory:
        """A new memory that holds these images, handles 0 to T - 1."""
        episode = self.as_episodes(images)
        maps = self.encoder(episode)
        batch, length = maps.shape[:2]
        places = self.placer.place(self.placer.propose(maps), batch, length, maps.device, generator)
        empty = self.empty(batch)
        memory = self._fill(empty, self._blocks(episode, maps), places)
        if self.memory_dtype != "float32":
            memory = memory.rounded(self.memory_dtype)
        return memory if images.ndim == 5 else memory[0]

    @torch.no_grad()
    def append(
        self, memory: Memory, images: Images, *, generator: torch.Generator | None = None
    ) -> Memory:
        """Write more images of one episode into free places: only they are encoded, only their
        places change. The cost does not depend on how many are held."""
        if images.ndim != 4:
            raise UserError(f"append takes the images of one episode, got {tuple(images.shape)}")
        self.as_maps(memory, images)
        self.placer.check_room(len(memory) + len(images))
        episode = self.as_episodes(images)
        maps = self.encoder(episode)
        blocks, batch = self._blocks(episode, maps), Memory.stack([memory])
        assert batch.slots is not None
        for t in range(len(images)):  # one after another: each sees what the last one took
            proposal = self.placer.propose(maps[:, t : t + 1])
            held = batch.slots.owners >= 0
            places = self.placer.vacant(proposal, held, 1, generator)
            batch = self._fill(batch, blocks[:, t : t + 1], places)
            assert batch.slots is not None
        return batch[0]

    def empty(self, batch: int | None = None) -> Memory:
        """A memory that holds nothing."""
        config, device = self.config.memory, self.device
        lead = () if batch is None else (batch,)
        owners = torch.full((*lead, config.capacity), -1, dtype=torch.long, device=device)
        points = torch.zeros(*lead, config.capacity, 2, device=device)
        if self.placer.grid is not None:
            points = points + self.placer.grid.centres(device)
        disjoint = config.read == "hard"
        blocks = None
        if not disjoint:
            blocks = torch.zeros(*lead, config.capacity, *self.writer.shape, device=device)
        slots = Slots(owners=owners, points=points, blocks=blocks, disjoint=disjoint, issued=0)
        return Memory(torch.zeros(*lead, *config.shape, device=device), slots)

    def _fill(self, memory: Memory, blocks: Float[Tensor, "B T Cm h w"], places: Places) -> Memory:
        """Paste blocks into a batch of memories and enter them in the books."""
        slots = memory.slots
        assert slots is not None
        count, length = blocks.shape[:2]
        free = (slots.owners < 0).long().sort(dim=1, descending=True, stable=True).indices
        where = free[:, :length] if places.cells is None else places.cells
        new = slots.issued + torch.arange(length, device=where.device).expand(count, -1)
        points = slots.points.scatter(1, where[..., None].expand(-1, -1, 2), places.points)
        kept = slots.blocks
        if kept is not None:
            index = where[:, :, None, None, None].expand_as(blocks)
            kept = kept.scatter(1, index, blocks)
        return Memory(
            memory.map + self.placer.paste(blocks, places),
            replace(
                slots,
                owners=slots.owners.scatter(1, where, new),
                points=points,
                blocks=kept,
                issued=slots.issued + length,
            ),
        )

    # Find again

    def keys_at(self, memory: Memory, slots: Int[Tensor, "B T"], maps: FeatureMaps) -> KeyPosterior:
        """q(y|.) of samples that look where `slots` are; a free slot is an unwritten sample's."""
        owners, points = self._books(memory)
        held = owners.gather(1, slots) >= 0
        places = Places(_of_slots(points, slots), slots if self.placer.grid is not None else None)
        empty = (owners < 0).sum(dim=1).float()
        return self.placer.posterior(places, self.placer.propose(maps), held, empty)

    def keys_elsewhere(
        self, memory: Memory, maps: FeatureMaps, generator: torch.Generator | None = None
    ) -> KeyPosterior:
        """q(y|.) of samples that are not in this memory: a free place. Where there is none it has
        no mass, and costs infinitely much."""
        held = self._books(memory)[0] >= 0
        proposal = self.placer.propose(maps)
        places = self.placer.vacant(proposal, held, maps.shape[1], generator)
        unwritten = torch.zeros(maps.shape[:2], dtype=torch.bool, device=maps.device)
        empty = (~held).sum(dim=1).float()
        return self.placer.posterior(places, proposal, unwritten, empty)

    @torch.no_grad()
    def address(
        self, memory: Memory, cue: Images, *, observed: Observed | None = None
    ) -> Addressed:
        """Score each cue against every block held, through p(x | z) at the z its block predicts.

        Content addressing: blocks are decoded once and compared with all cues, on `observed`
        pixels only (1 or 0 for each) where part of a cue is hidden. Works for every placement.
        """
        maps, episode = self.as_maps(memory, cue), self.as_episodes(cue)
        owners, points = self._books(memory)
        held = owners >= 0
        slots = held.any(dim=0).nonzero()[:, 0]  # held in some episode of the batch
        if observed is not None:
            if observed.shape != (*cue.shape[:-3], *cue.shape[-2:]):
                raise UserError(
                    f"observed says 1 or 0 for each pixel of each cue, {tuple(cue.shape)} without "
                    f"its channels; got {tuple(observed.shape)}"
                )
            observed = observed if observed.ndim == 4 else observed[None]
        scores = torch.full((*episode.shape[:2], held.shape[1]), -torch.inf, device=self.device)
        if len(slots) == 0:
            return Addressed(scores)
        pictures = self.decoder(self._predicted(maps, as_normal(points[:, slots])))
        for t in range(episode.shape[1]):
            one = episode[:, t : t + 1].expand(-1, len(slots), -1, -1, -1)
            seen = None
            if observed is not None:
                seen = observed[:, t : t + 1].expand(-1, len(slots), -1, -1)
            scores[:, t, slots] = self.likelihood.log_prob(pictures, one, seen)
        return Addressed(scores.masked_fill(~held[:, None], -torch.inf))

    def _predicted(self, memory: MemoryMap, keys: Points) -> Readout:
        """The readout that a read at these keys leads one to expect."""
        return self.readout(self.traces(memory, keys), sample=False).readout

    def _by_content(
        self,
        images: Images,
        episode: Episode,
        maps: FeatureMaps,
        memory: Memory,
        sample: bool,
        generator: torch.Generator | None,
    ) -> ElboTerms:
        """The bound where an image may lie anywhere, or nowhere, in the memory. Which of the two
        is decided at posterior means, before any sample is drawn: so it remains a bound."""
        map = self.as_maps(memory, images)
        nowhere = self.keys_elsewhere(memory, maps, generator)
        best = self.keys_at(memory, self.address(memory, images).slots, maps)
        means, drawn = [], []
        for keys in (nowhere, best):
            means.append(self.terms(episode, maps, map, keys, sample=False).nll_nats)
            terms = self.terms(episode, maps, map, keys, sample=sample, generator=generator)
            drawn.append(vars(terms).values())
        holds_nothing = (self._books(memory)[0] < 0).all(dim=1, keepdim=True)
        first = (means[0] < means[1]) | holds_nothing
        return ElboTerms(*[torch.where(first, *pair) for pair in zip(*drawn, strict=True)])

    @torch.no_grad()
    def familiarity(self, memory: Memory, images: Images) -> PerImage:
        """How much better the best block held explains an image than no block does: nats.

        Large for what was written, smaller for what was not (below zero on binary sets):
        ln p(x | the block whose sketch is nearest) less what an empty place gives, both at means: a
        score, not a bound.
        """
        episode, best = self.as_episodes(images), self.address(memory, images).slots
        maps, (owners, points) = self.as_maps(memory), self._books(memory)
        at = as_normal(_of_slots(points, best))
        known = self.log_likelihood(self._predicted(maps, at), episode)
        nothing = torch.zeros(*episode.shape[:2], *self.writer.shape, device=self.device)
        reading = self.readout(nothing, self.encoder(episode), sample=False)
        score = known - (self.log_likelihood(reading.readout, episode) - reading.kl)
        score = score.masked_fill((owners < 0).all(dim=1, keepdim=True), -torch.inf)
        return score if images.ndim == 5 else score[0]

    @torch.no_grad()
    def recall(
        self,
        memory: Memory,
        cue: Images,
        *,
        steps: int = 10,
        sample: bool = False,
        observed: Observed | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "S *B T C H W"]:
        """Hold M; find the block that explains the picture best, read it, decode, and again.

        `sample=True` draws the key from q(y|.) and the readout from p(z|M, y) at each step; else
        both are taken at their means.
        """
        if steps < 1:
            raise UserError(f"steps must be at least 1, got {steps}")
        maps, picture = self.as_maps(memory, cue), self.as_episodes(cue)
        pictures = []
        for step in range(steps):
            told = None if step else observed
            held = self.address(memory, picture if cue.ndim == 5 else picture[0], observed=told)
            if told is not None:  # q(y|.) too sees visible pixels only
                picture = picture * (told if told.ndim == 4 else told[None])[:, :, None]
            keys = self.keys_at(memory, held.slots, self.encoder(picture))
            y = keys.sample(generator) if sample else keys.mean
            reading = self.readout(self.traces(maps, y), sample=sample, generator=generator)
            picture = self.likelihood.mean(self.decoder(reading.readout))
            pictures.append(picture if memory.is_batch else picture[0])
        return torch.stack(pictures)

    # Generate (§3.4), read

    @torch.no_grad()
    def generate(
        self,
        memory: Memory | None,
        num_samples: int,
        *,
        near: tuple[Float[Tensor, "2"], float] | None = None,
        drawn: bool = False,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "*B T C H W"]:
        """Draw keys from their prior, read, draw a readout, decode its expected pixels.

        `near=(key, spread)` draws keys around one instead: y + spread * noise (§4.1.1).
        `drawn=True` draws pixels too.
        """
        if num_samples < 1:
            raise UserError(f"num_samples must be at least 1, got {num_samples}")
        memory = self.given(memory)
        lead = memory.map.shape[:1] if memory.is_batch else ()
        shape = (*lead, num_samples, 2)
        keys = torch.randn(shape, generator=generator, device=self.device)
        if near is not None:
            if tuple(near[0].shape) != self.key_shape:
                raise UserError(f"a key is {self.key_shape}, got {tuple(near[0].shape)}")
            keys = near[0].to(self.device) + near[1] * keys
        return self.generate_at(memory, keys, drawn=drawn, generator=generator)

    @torch.no_grad()
    def generate_at(
        self,
        memory: Memory,
        keys: Float[Tensor, "*B T 2"],
        *,
        drawn: bool = False,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "*B T C H W"]:
        """A picture for each key: read there, draw a readout, decode its expected pixels; or draw
        those too."""
        maps, keys = self._with_keys(memory, keys)
        z = self.readout(self.traces(maps, keys), generator=generator).readout
        images = self.draw_pixels(z, generator) if drawn else self.likelihood.mean(self.decoder(z))
        return images if memory.is_batch else images[0]

    def read(self, memory: Memory, keys: Float[Tensor, "*B T 2"]) -> Readout:
        """The readout that the memory predicts at each key: the mean of p(z | M, y), part by part,
        (B, T, L); B = 1 for one episode."""
        return self._predicted(*self._with_keys(memory, keys))

    def _with_keys(self, memory: Memory, keys: Float[Tensor, "*B T 2"]) -> tuple[MemoryMap, Points]:
        maps, keys = self.as_maps(memory), keys if keys.ndim == 3 else keys[None]
        if keys.ndim != 3 or len(keys) != len(maps) or keys.shape[-1] != 2:
            raise UserError(f"keys {tuple(keys.shape)} do not fit memory {tuple(maps.shape)}")
        return maps, keys

    @torch.no_grad()
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]:
        """Write, read at one's own place, decode what the memory alone predicts there."""
        episode, noise = self.as_episodes(images), torch.Generator(self.device).manual_seed(0)
        memory, keys = self.write_episode(episode, self.encoder(episode), noise)
        pixels = self.likelihood.mean(self.decoder(self._predicted(memory, keys.mean)))
        return pixels if images.ndim == 5 else pixels[0]

    # For scores: densities, importance weights, a control

    def joint(
        self, episode: Episode, maps: MemoryMap, keys: Points, readout: Readout
    ) -> JointDensity:
        """ln p(x, z, y | M): everything the generative side says, from M, y and z alone."""
        reading = self.readout(self.traces(maps, keys), readout=readout)
        return JointDensity(
            log_likelihood=self.log_likelihood(readout, episode),
            readout_log_prior=reading.log_prior,
            key_log_prior=DiagonalNormal.standard_like(keys).log_prob(keys),
        )

    def weighing(self, episode: Episode, generator: torch.Generator | None) -> Weigh:
        """ln p(x, z, y | M) - ln q(z, y | X), draw by draw, M and the deal fixed."""
        maps = self.encoder(episode)
        memory, keys = self.write_episode(episode, maps, generator)

        def draw() -> PerImage:
            y = keys.sample(generator)
            reading = self.readout(self.traces(memory, y), maps, generator=generator)
            likelihood = self.log_likelihood(reading.readout, episode)
            z_ratio = reading.log_prior - reading.log_posterior
            return likelihood + z_ratio - keys.log_ratio(y)

        return draw

    def left_out(self, images: Images, *, generator: torch.Generator | None = None) -> ElboTerms:
        """Each image scored in the memory of the rest of its episode, its key at a free place: the
        cost of an image that was not written (a control)."""
        episode = self.as_pixels(images)
        batch, length = episode.shape[:2]
        others = all_but_one(length, episode.device)
        self.placer.check_room(length)
        maps = self.encoder(episode)
        alone = maps.flatten(0, 1)[:, None]  # (B T, 1, ...): each image as its own episode
        blocks = self._blocks(episode, maps)[:, others].flatten(0, 1)  # (B T, T - 1, ...)
        proposal = self.placer.propose(maps)
        if proposal is not None:
            proposal = mapped(proposal, lambda value: value[:, others].flatten(0, 1))
        places = self.placer.place(proposal, len(blocks), length - 1, maps.device, generator)
        memory = self._fill(self.empty(len(blocks)), blocks, places)
        terms = self.terms(
            episode.flatten(0, 1)[:, None],
            alone,
            self.settled(memory.map),
            self.keys_elsewhere(memory, alone, generator),
            generator=generator,
        )
        shape = (batch, length) if images.ndim == 5 else (length,)
        return terms.view(shape)

    def permuted(self, images: Images, *, generator: torch.Generator | None = None) -> ElboTerms:
        """Each image read where its neighbour in the episode lies (a control)."""
        episode = self.as_pixels(images)
        maps = self.encoder(episode)
        memory, keys = self.write_episode(episode, maps, generator)
        rolled = mapped(keys, lambda value: value.roll(1, dims=1))
        terms = self.terms(episode, maps, memory, rolled, generator=generator)
        return terms if images.ndim == 5 else terms[0]

    # The books

    def as_maps(self, memory: Memory, images: Images | None = None) -> MemoryMap:
        """Check that a memory fits this model: its map, and its slots."""
        maps = super().as_maps(memory, images)
        if memory.slots is not None and memory.capacity != self.config.memory.capacity:
            raise UserError(
                f"this model's memories have {self.config.memory.capacity} places, got one of "
                f"{memory.capacity}"
            )
        return maps

    def _books(self, memory: Memory) -> tuple[Int[Tensor, "B slots"], Float[Tensor, "B slots 2"]]:
        if memory.slots is None:
            raise UserError("this memory has no slots: it was written by another kind of model")
        owners, points = memory.slots.owners, memory.slots.points
        return (owners, points) if memory.is_batch else (owners[None], points[None])

    def _slots_of(self, memory: Memory, handles: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """The slots of handles that are held."""
        owners, _ = self._books(memory)
        matches = owners[:, None] == handles[..., None]  # (B, T, slots)
        if not bool(matches.any(dim=-1).all()) or bool((handles < 0).any()):
            raise UserError("a handle given is not held by this memory")
        return matches.int().argmax(dim=-1)


def _of_slots(points: Float[Tensor, "B slots 2"], slots: Int[Tensor, "B T"]) -> Points:
    """Where these slots lie."""
    return points.gather(1, slots[..., None].expand(-1, -1, 2))
