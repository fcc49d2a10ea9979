"""`vma`: Variational Memory Addressing (Bornschein, Mnih, Zoran, Rezende 2017).

A memory is a list of templates m_1 .. m_T, and a read is one discrete choice among them:

    p(x | M) = sum_a p(a | M) integral p(z | m_a) p(x | z, m_a) dz
    q(a, z | x, M) = q(a | x, M) q(z | x, m_a)

Nothing is compressed. If an image is among its own templates, the model only has to name one of T
and copy it: it is a slot store, with the floor ln T that other memories are compared with. The
authors ask another question, how much *other* images help to predict one: their memories hold
further drawings of a character, up to 19 of Omniglot's 20, without the target. So the figure to
compare with the 103.6 of K++'s Table 1 (Omniglot) is `left_out`. We train for both (ours): in each
training episode, the own template of every second image is hidden from p and q.

Training uses VIMCO (Mnih & Rezende 2016) as theirs does, averaged with the one-sample bound (ours).

Also ours: q(a | x, M) is a softmax over the cosines of an image with each template, times a learned
scale; q(z | x, m) is a residual, in units of p(z | m); the decoder sees z and a projection of the
template's embedding, and outputs one more map, a gate for the template's own pixels.
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kanerva.memory.heap import Memory
from kanerva.models.base import Images, LogWeights, Near, Observed, all_but_one
from kanerva.models.rivals.vma_networks import (
    Hidden,
    LogChances,
    PerDraw,
    TemplateModel,
    Templates,
    at,
    categorical_kl,
    expected,
    one_sample,
    own_hidden,
    sample_addresses,
    vimco,
)
from kanerva.models.terms import ElboTerms, JointDensity
from kanerva.seeding import Noise, as_generator
from kanerva.shapes import Embedding, Episode, MemoryMap, PerImage, Readout

DRAWS = 4  # k: samples of (a, z) in the VIMCO objective


class VariationalMemoryAddressing(TemplateModel):
    """A categorical address over stored images, and a VAE conditioned on the one that is read."""

    reconstructed = "reconstructed: likeliest a of q(a|x), mean of q(z|x, m)"

    # The bound

    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        sample: bool = True,
        generator: Noise = None,
    ) -> ElboTerms:
        """sum_a q(a) [ln p(x | z_a, m_a) - KL_a] - KL[q(a) || p(a | M)], with the episode's own
        templates or those of a given memory.

        The sum over a is exact: every image is decoded once for each template, T * T decodes for an
        episode. z is sampled once, with the same noise for every template; `sample=False` takes its
        mean (not a bound).
        """
        episode = self.as_pixels(images)
        seen = self.encoder(episode)
        held = Templates(episode, seen)
        if memory is not None:
            held = self.templates(self.as_maps(memory, images))
        log_q = self.address_posterior(seen, held)
        return self._terms(images, seen, held, log_q, sample=sample, generator=generator)

    def _terms(
        self,
        images: Images,
        seen: Embedding,
        held: Templates,
        log_q: LogChances,
        hidden: Hidden | None = None,
        *,
        sample: bool = True,
        generator: Noise,
    ) -> ElboTerms:
        """The bound, given q(a) of each image. `images` with or without a batch dimension."""
        episode = self.as_episodes(images)
        batch, length = episode.shape[:2]
        noise = self._noise(batch, length, generator) if sample else None
        likelihoods, divergences = [], []
        for a in range(len(held)):
            read = held.only(a, length)
            reading = self.infer(seen, read, noise)
            output = self.decode(reading.readout, read)
            likelihoods.append(self.likelihood.log_prob(output, episode))
            divergences.append(reading.kl)
        terms = ElboTerms(
            log_likelihood=expected(log_q, torch.stack(likelihoods, dim=-1)),
            readout_kl=expected(log_q, torch.stack(divergences, dim=-1)),
            key_kl=categorical_kl(log_q, self.address_prior(held, length, hidden)),
        )
        return terms if images.ndim == 5 else terms[0]

    # Training

    def forward(self, episode: Episode, generator: Noise = None) -> dict[str, Tensor]:
        """`DRAWS` samples of (a, z); the own template of every second image is hidden.

        The objective is the mean of two bounds: the authors' k-sample one (VIMCO), and the
        one-sample bound (ours). For the first alone, it suffices that one of k samples finds the
        right template; q(a) then stays wide, although scores use a single sample.

        The values of the terms are those of the one-sample bound, averaged over the samples: what
        `elbo` and, for every second image, `left_out` estimate. Their gradient is that of the
        objective.
        """
        batch, length = episode.shape[:2]
        seen, hidden = self.encoder(episode), own_hidden(length, episode.device)
        held = Templates(episode, seen)
        log_q = self.address_posterior(seen, held, hidden)
        log_p = self.address_prior(held, length, hidden)

        def many(value: Tensor) -> Tensor:
            """Repeat along the episode, once for each sample: (B, k T, ...)."""
            return value.repeat(1, DRAWS, *[1] * (value.ndim - 2))

        q, p = many(log_q), many(log_p)
        address = sample_addresses(q.detach(), generator)
        read = held.at(address)
        reading = self.infer(many(seen), read, self._noise(batch, DRAWS * length, generator))
        output = self.decode(reading.readout, read)
        likelihood = self.likelihood.log_prob(output, many(episode))
        log_chance = at(address, q)
        weights = likelihood + at(address, p) - log_chance
        weights = weights + reading.log_prior - reading.log_posterior

        def split(value: Float[Tensor, "B N"]) -> PerDraw:
            """Undo `many`: (k, B, T)."""
            return value.unflatten(1, (DRAWS, length)).transpose(0, 1)

        parts = split(weights), split(log_chance)
        objective = (vimco(*parts) + one_sample(*parts)) / 2
        terms = ElboTerms(
            log_likelihood=split(likelihood).mean(0).detach() + objective - objective.detach(),
            readout_kl=split(reading.kl).mean(0).detach(),
            key_kl=categorical_kl(log_q, log_p).detach(),
        )
        return terms.by_name()

    # Write, append, generate

    def write(self, images: Images, *, generator: Noise = None) -> Memory:
        """Store the images, pixel by pixel."""
        maps = self.as_pixels(images).flatten(1, 2)
        return self.signed(Memory(maps if images.ndim == 5 else maps[0]))

    def append(self, memory: Memory, images: Images, *, generator: Noise = None) -> Memory:
        """Add templates after the stored ones."""
        maps = torch.cat([self.as_maps(memory, images), self.as_pixels(images).flatten(1, 2)], 1)
        return replace(memory, map=maps if memory.is_batch else maps[0])

    def empty(self, batch: int | None = None) -> Memory:
        """Make a memory with one template of zeros: p(a | M) needs at least one."""
        lead = () if batch is None else (batch,)
        return self.signed(Memory(torch.zeros(*lead, *self.memory_shape(1), device=self.device)))

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
        """Sample a template from p(a | M) and a readout from p(z | m_a), and decode its expected
        pixels; with `sample_pixels`, sample pixels too."""
        memory = self.require_memory(memory)
        self.check_samples(num_samples, near)
        held = self.templates(self.as_maps(memory))
        read = held.at(sample_addresses(self.address_prior(held, num_samples), generator))
        output = self.decode(self.readout_prior(read).sample(generator), read)
        if sample_pixels:
            images = self.likelihood.sample(output, as_generator(generator))
        else:
            images = self.likelihood.mean(output)
        return images if memory.is_batch else images[0]

    # Recall

    @torch.no_grad()
    def recall(
        self,
        memory: Memory,
        cue: Images,
        *,
        steps: int | None = None,
        sample: bool = False,
        observed: Observed | None = None,
        generator: Noise = None,
    ) -> Float[Tensor, "S *B T C H W"]:
        """Repeat: find the template most like the last picture, decode the mean of p(z | m_a).
        Returns every step. `sample=True` samples addresses. q(a | x, M) needs whole pictures, so
        `observed` is ignored. The authors do not iterate."""
        held = self.templates(self.as_maps(memory, cue))

        def read_once(picture: Episode) -> Episode:
            log_q = self.address_posterior(self.encoder(picture), held)
            read = held.at(sample_addresses(log_q, generator) if sample else log_q.argmax(dim=-1))
            return self.likelihood.mean(self.decode(self.readout_prior(read).mean, read))

        return self.iterate_read(memory, cue, steps, read_once)

    @torch.no_grad()
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]:
        """Read the likeliest template of the episode, and decode the mean of q(z | x, m_a)."""
        episode = self.as_episodes(images)
        seen = self.encoder(episode)
        held = Templates(episode, seen)
        read = held.at(self.address_posterior(seen, held).argmax(dim=-1))
        output = self.decode(self.infer(seen, read, None).readout, read)
        pixels = self.likelihood.mean(output)
        return pixels if images.ndim == 5 else pixels[0]

    # For scores: densities, importance weights, controls

    def joint(
        self, episode: Episode, maps: MemoryMap, keys: Float[Tensor, "B T 1"], readout: Readout
    ) -> JointDensity:
        """ln p(x, z, a | M), from the templates, a and z alone. Keys encode addresses (`keys_of`);
        `key_log_prior` is ln p(a | M)."""
        held = self.templates(maps)
        return self._joint(episode, held, self.addresses_of(keys, len(held)), readout)

    def _joint(
        self, episode: Episode, held: Templates, addresses: Int[Tensor, "B T"], readout: Readout
    ) -> JointDensity:
        read = held.at(addresses)
        return JointDensity(
            log_likelihood=self.likelihood.log_prob(self.decode(readout, read), episode),
            readout_log_prior=self.readout_prior(read).log_prob(readout),
            key_log_prior=at(addresses, self.address_prior(held, addresses.shape[1])),
        )

    def importance_sampler(self, episode: Episode, generator: Noise) -> LogWeights:
        """Each call samples a and z: ln p(x, z, a | M) - ln q(z, a | x, M)."""
        batch, length = episode.shape[:2]
        seen = self.encoder(episode)
        held = Templates(episode, seen)
        log_q = self.address_posterior(seen, held)

        def draw() -> PerImage:
            address = sample_addresses(log_q, generator)
            noise = self._noise(batch, length, generator)
            reading = self.infer(seen, held.at(address), noise)
            joint = self._joint(episode, held, address, reading.readout)
            return joint.total - (at(address, log_q) + reading.log_posterior)

        return draw

    def left_out(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """Score each image with the other T - 1 templates. Here this is more than a control: the
        authors' memories do not hold the target, so it compares with their 103.6 (Omniglot)."""
        episode = self.as_pixels(images)
        rest = all_but_one(episode.shape[1], episode.device)  # refuses episodes of one image
        hidden = torch.eye(len(rest), dtype=torch.bool, device=episode.device)
        seen = self.encoder(episode)  # without temporal shift: it does not mix images
        held = Templates(episode, seen)
        log_q = self.address_posterior(seen, held, hidden)
        return self._terms(images, seen, held, log_q, hidden, generator=generator)

    def permuted(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """Score each image with its neighbour's q(a) (a control)."""
        episode = self.as_pixels(images)
        seen = self.encoder(episode)
        held = Templates(episode, seen)
        log_q = self.address_posterior(seen, held).roll(1, dims=1)
        return self._terms(images, seen, held, log_q, generator=generator)
