"""`vma`: Variational Memory Addressing (Bornschein, Mnih, Zoran, Rezende 2017).

    memory = model.write(images)                # the images themselves, every pixel
    terms = model.elbo(images)                  # a sum over all addresses, in nats
    terms = model.left_out(images)              # each image among the others' templates
    samples = model.generate(memory, 64)        # pick a template, vary it

A memory is a list of templates m_1 .. m_T, and a read is one discrete choice among them:

    p(x | M) = sum_a p(a | M) integral p(z | m_a) p(x | z, m_a) dz
    q(a, z | x, M) = q(a | x, M) q(z | x, m_a)

Nothing is compressed: with an image among its own templates this is a copier that need only name
one of T, the slot store whose floor ln T other memories are held to. The authors ask another
question, what *other* images tell of one: their memories hold further drawings of a character, up
to 19 of Omniglot's 20, which leaves the target out. So the figure to set beside the 103.6 of K++'s
Table 1 (Omniglot) is `left_out`. Both are trained here (ours): of each training episode, every
second image has its own template hidden from p and q.

Training follows VIMCO (Mnih & Rezende 2016) as theirs, averaged with the one-sample bound (ours).

What is ours besides: an image's address is found by its cosine with each template, times a learned
scale; q(z | x, m) is residual, in units of p(z | m); the decoder sees z and a projection of the
template's embedding, and gives one map more by which the template's own pixels pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kanerva.config import VmaConfig
from kanerva.decoder import Decoder
from kanerva.distributions import DiagonalNormal, as_normal, as_uniform
from kanerva.encoder import EpisodeEncoder
from kanerva.errors import UserError
from kanerva.memory.heap import Memory
from kanerva.models.base import (
    Handles,
    Images,
    LogWeights,
    MemoryModel,
    Near,
    Observed,
    all_but_one,
)
from kanerva.models.terms import ElboTerms, JointDensity
from kanerva.seeding import Noise, as_generator, normal, uniform
from kanerva.shapes import DecoderOutput, Embedding, Episode, MemoryMap, PerImage, Readout

ENUMERATED = 64  # ours: a bound sums over all addresses of a memory of at most so many templates
DRAWS = 4  # k: samples of (a, z) in VIMCO's objective, and in bounds where there are more templates
_SHARPEST = math.log(100.0)  # ours: of the learned scale of cosines
_WHOLE: dict[str, int] = {"bernoulli": 1, "logistic_mixture": 8}  # bits of a channel's pixel

Addresses = Int[Tensor, "B N"]
LogChances = Float[Tensor, "B N M"]  # ln of a distribution over M templates, for each image
Hidden = Bool[Tensor, "T M"]  # True: a template that an image must do without
PerDraw = Float[Tensor, "k B T"]


def vimco(log_weights: PerDraw, log_chances: PerDraw) -> Float[Tensor, "B T"]:
    """ln (1/k) sum_i w_i, with the gradient of its expectation (Mnih & Rezende 2016).

    w_i = p(x, z_i, a_i) / q(z_i, a_i) may be differentiated through z_i; choosing a_i may not, so
    ln q(a_i) is weighted by what draw i adds to the bound. What it would have been without: w_i
    replaced by the geometric mean of the others, which draw i has no part in, hence no bias.
    """
    k = len(log_weights)
    if k < 2:
        raise UserError(f"VIMCO compares draws with each other: it needs at least 2, got {k}")
    bound = log_weights.logsumexp(dim=0) - math.log(k)
    fixed = log_weights.detach()
    itself = torch.eye(k, dtype=torch.bool, device=fixed.device)[:, :, None, None]  # draw i, j
    others = torch.where(itself, 0.0, fixed).sum(dim=1) / (k - 1)
    without = torch.where(itself, others[:, None], fixed).logsumexp(dim=1) - math.log(k)
    score = ((bound.detach() - without) * log_chances).sum(dim=0)
    return bound + score - score.detach()


def one_sample(log_weights: PerDraw, log_chances: PerDraw) -> Float[Tensor, "B T"]:
    """The mean of ln w_i, with the gradient of its expectation, the bound that scores estimate:
    ln q(a_i) is weighted by how much better draw i is than the others."""
    k = len(log_weights)
    fixed = log_weights.detach()
    score = ((fixed - fixed.mean(dim=0)) / (k - 1) * log_chances).sum(dim=0)
    return log_weights.mean(dim=0) + score - score.detach()


def expected(log_chances: LogChances, values: LogChances) -> Float[Tensor, "B N"]:
    """The sum over templates of q(a) times a value; what cannot be chosen counts for nothing."""
    chances = log_chances.exp()
    return torch.where(chances > 0, chances * values, 0.0).sum(dim=-1)


def categorical_kl(q: LogChances, p: LogChances) -> Float[Tensor, "B N"]:
    """KL[q(a) || p(a)]. A template hidden from both costs nothing (0 ln 0/0)."""
    known = ~q.isneginf()
    return expected(q, torch.where(known, q, 0.0) - torch.where(known, p, 0.0))


def drawn(log_chances: LogChances, generator: Noise) -> Addresses:
    """One address for each row: the largest of ln q(a) + Gumbel noise."""
    noise = uniform(tuple(log_chances.shape), generator, log_chances.device).clamp(min=1e-30)
    return (log_chances - (-noise.log()).log()).argmax(dim=-1)


def at(addresses: Addresses, values: LogChances) -> Float[Tensor, "B N"]:
    """The number that stands at each address; its gradient is the same on every run."""
    chosen = addresses[..., None] == torch.arange(values.shape[-1], device=values.device)
    return torch.where(chosen, values, 0.0).sum(dim=-1)


@dataclass(frozen=True)
class Templates:
    """What a memory holds: images, and the embeddings that are made of them."""

    pixels: Float[Tensor, "B M C H W"]
    embedding: Float[Tensor, "B M D"]

    def __len__(self) -> int:
        return self.pixels.shape[1]

    def at(self, addresses: Addresses) -> "Templates":
        """Those at some addresses, one for each. Embeddings as a product: the gradient of that is
        the same on every run."""
        pixels = pixels_at(self.pixels, addresses)
        chosen = addresses[..., None] == torch.arange(len(self), device=addresses.device)
        return Templates(pixels, chosen.to(self.embedding.dtype) @ self.embedding)

    def only(self, a: int, length: int) -> "Templates":
        """One of them for all images of an episode."""
        pixels = self.pixels[:, a : a + 1].expand(-1, length, -1, -1, -1)
        return Templates(pixels, self.embedding[:, a : a + 1].expand(-1, length, -1))


def pixels_at(
    pixels: Float[Tensor, "B M C H W"], addresses: Addresses
) -> Float[Tensor, "B N C H W"]:
    """The images at some addresses."""
    index = addresses[..., None, None, None].expand(-1, -1, *pixels.shape[2:])
    return pixels.gather(1, index)


@dataclass(frozen=True)
class Reading:
    """z at one template for each image: p's normal, q's, and a value drawn from q."""

    prior: DiagonalNormal
    posterior: DiagonalNormal
    readout: Readout


class VariationalMemoryAddressing(MemoryModel):
    """A categorical address over stored images, and a VAE given the one that is read."""

    reconstructed = "reconstructed: likeliest a of q(a|x), mean of q(z|x, m)"

    has_keys = False
    config: VmaConfig

    def __init__(self, config: VmaConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        readout, hidden = config.readout, config.keys.hidden
        self.encoder = EpisodeEncoder(config.encoder, channels)
        features = self.encoder.features
        self.score = nn.Sequential(nn.Linear(features, hidden), nn.SiLU(), nn.Linear(hidden, 1))
        self.query, self.key = nn.Linear(features, hidden), nn.Linear(features, hidden)
        self.key.load_state_dict(self.query.state_dict())  # like finds like from the first step
        self.log_scale = nn.Parameter(torch.full((1,), math.log(10.0)))
        self.prior = nn.Sequential(
            nn.Linear(features, readout.hidden),
            nn.SiLU(),
            nn.Linear(readout.hidden, 2 * readout.size),
        )
        self.posterior = nn.Sequential(
            nn.Linear(2 * features, readout.hidden),
            nn.SiLU(),
            nn.Linear(readout.hidden, 2 * readout.size),
        )
        outputs = self.likelihood.outputs(channels)
        self.told = nn.Linear(features, readout.size)
        self.decoder = Decoder(config.decoder, 2 * readout.size, outputs + 1, height, width)
        self.copied = nn.Conv2d(channels, outputs, 3, padding=1)

    @property
    def key_shape(self) -> tuple[int, ...]:
        """One number: the quantile of a template in the list. See `addresses_of`."""
        return (1,)

    # The memory: templates, verbatim

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        channels, height, width = self.config.image
        return (length * channels, height, width)

    def memory_bits(self, length: int, dtype: str = "float32") -> float:
        """Pixels as they are: 1 bit each where they are 0 or 1, else 8. There is nothing to round,
        so `dtype` and `memory_dtype` change nothing."""
        return float(math.prod(self.memory_shape(length)) * _WHOLE[self.config.likelihood])

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Memories of any number of templates serve."""
        channels, height, width = self.config.image
        if shape[1:] != (height, width) or shape[0] == 0 or shape[0] % channels:
            raise UserError(
                f"this model's memories are (templates * {channels}, {height}, {width}), "
                f"got {shape}"
            )

    def images_of(self, maps: MemoryMap) -> Float[Tensor, "B M C H W"]:
        """A memory as the images that it holds."""
        return maps.unflatten(1, (-1, self.config.image[0]))

    def templates(self, maps: MemoryMap) -> Templates:
        """The same, embedded: all that p sees."""
        pixels = self.images_of(maps)
        return Templates(pixels, self.encoder(pixels))

    def addresses_of(self, keys: Float[Tensor, "B N 1"], count: int) -> Addresses:
        """The template each key points at: N(0, 1) cut into `count` equal parts."""
        place = (as_uniform(keys[..., 0]) + 1) / 2
        return (place * count).long().clamp(0, count - 1)

    def keys_of(self, addresses: Addresses, count: int) -> Float[Tensor, "B N 1"]:
        """The key in the middle of a template's part."""
        return as_normal((2 * addresses[..., None] + 1) / count - 1)

    def traces(self, maps: MemoryMap, keys: Float[Tensor, "B T 1"]) -> Float[Tensor, "B T C H W"]:
        """The templates that keys point at."""
        images = self.images_of(maps)
        return pixels_at(images, self.addresses_of(keys, images.shape[1]))

    def read(
        self,
        memory: Memory,
        keys: Float[Tensor, "*B_T_key"] | None = None,
        *,
        handles: Handles | None = None,
    ) -> DiagonalNormal:
        """p(z | m_a) at the templates that keys point at, or that handles number."""
        held = self.templates(self.as_maps(memory))
        if (keys is None) == (handles is None):
            raise UserError("say where to read: keys, or handles")
        if keys is not None:
            addresses = self.addresses_of(self.check_keys(memory, keys)[1], len(held))
        else:
            addresses = torch.as_tensor(handles, device=self.device).view(len(held.pixels), -1)
            if bool(((addresses < 0) | (addresses >= len(held))).any()):
                raise UserError("a handle given is not held by this memory")
        return self.readout_prior(held.at(addresses))

    # The address

    def address_prior(
        self, held: Templates, count: int, hidden: Hidden | None = None
    ) -> LogChances:
        """ln p(a | M), a softmax over a score of each template, for so many images: the same for
        all that may read the same templates."""
        with torch.autocast(self.device.type, enabled=False):
            scores = self.score(held.embedding.float())[..., 0]
        return _without(scores[:, None].expand(-1, count, -1), hidden).log_softmax(dim=-1)

    def address_posterior(
        self, seen: Embedding, held: Templates, hidden: Hidden | None = None
    ) -> LogChances:
        """ln q(a | x, M): by how alike an image's query and a template's key are."""
        with torch.autocast(self.device.type, enabled=False):
            queries = F.normalize(self.query(seen.float()), dim=-1)
            keys = F.normalize(self.key(held.embedding.float()), dim=-1)
            alike = self.log_scale.clamp(max=_SHARPEST).exp() * (queries @ keys.mT)
        return _without(alike, hidden).log_softmax(dim=-1)

    # z and x, given the template of each image

    def readout_prior(self, read: Templates) -> DiagonalNormal:
        """p(z | m_a)."""
        return DiagonalNormal.from_network(self.prior(read.embedding))

    def infer(
        self, seen: Embedding, read: Templates, noise: Float[Tensor, "B T L"] | None
    ) -> Reading:
        """q(z | x, m_a) beside p(z | m_a), and z at this noise; at q's mean for None.

        mean = mu_p + sigma_p * delta, std = sigma_p * exp(rho): q says how an image differs.
        """
        prior = self.readout_prior(read)
        both = torch.cat([seen, read.embedding], dim=-1)
        said = DiagonalNormal.from_network(self.posterior(both))
        mean, log_std = prior.mean + prior.std * said.mean, prior.log_std + said.log_std
        posterior = DiagonalNormal(mean, log_std)
        return Reading(prior, posterior, mean if noise is None else mean + posterior.std * noise)

    def decode(self, readout: Readout, read: Templates) -> DecoderOutput:
        """p(x | z, m_a): z and the template's embedding, and its pixels as far as a map of the
        decoder's lets them through."""
        told = self.told(read.embedding)
        output = self.decoder(torch.cat([readout, told.to(readout.dtype)], dim=-1))
        pixels, gate = output[:, :, :-1], output[:, :, -1:]
        copied = self.copied(2 * read.pixels.flatten(0, 1) - 1).unflatten(0, readout.shape[:2])
        return pixels + gate * copied

    def _noise(self, batch: int, count: int, generator: Noise) -> Tensor:
        return normal((batch, count, self.config.readout.size), generator, self.device)

    # The bound

    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        sample: bool = True,
        generator: Noise = None,
    ) -> ElboTerms:
        """sum_a q(a) [ln p(x | z_a, m_a) - KL_a] - KL[q(a) || p(a | M)], given the episode's own
        templates or any others.

        Exact in a: every image is decoded once for each template, T * T decodes for an episode.
        That is done for at most 64 templates; given more, `DRAWS` addresses stand for the sum (the
        likeliest one, with `sample=False`), and KL[q(a) || p(a | M)] remains exact. One sample of
        z, its noise the same at every template; `sample=False` takes its mean (not a bound).
        """
        episode = self.as_pixels(images)
        seen = self.encoder(episode)
        if memory is None:
            held = Templates(episode, seen)
        else:
            held = self.templates(self.as_maps(memory, images))
        log_q, log_p = self.address_posterior(seen, held), self.address_prior(held, seen.shape[1])
        terms = self._terms(episode, seen, held, log_q, log_p, sample, generator)
        return terms if images.ndim == 5 else terms[0]

    def _terms(
        self,
        episode: Episode,
        seen: Embedding,
        held: Templates,
        log_q: LogChances,
        log_p: LogChances,
        sample: bool,
        generator: Noise,
    ) -> ElboTerms:
        batch, length = episode.shape[:2]
        noise = self._noise(batch, length, generator) if sample else None
        key_kl = categorical_kl(log_q, log_p)
        likelihoods: list[Tensor] = []
        divergences: list[Tensor] = []

        def look(read: Templates) -> None:
            reading = self.infer(seen, read, noise)
            output = self.decode(reading.readout, read)
            likelihoods.append(self.likelihood.log_prob(output, episode))
            divergences.append(reading.posterior.kl(reading.prior))

        if len(held) <= ENUMERATED:
            for a in range(len(held)):
                look(held.only(a, length))
            return ElboTerms(
                log_likelihood=expected(log_q, torch.stack(likelihoods, dim=-1)),
                readout_kl=expected(log_q, torch.stack(divergences, dim=-1)),
                key_kl=key_kl,
            )
        for _ in range(DRAWS if sample else 1):
            look(held.at(drawn(log_q, generator) if sample else log_q.argmax(dim=-1)))
        return ElboTerms(
            log_likelihood=torch.stack(likelihoods).mean(dim=0),
            readout_kl=torch.stack(divergences).mean(dim=0),
            key_kl=key_kl,
        )

    # Training

    def forward(self, episode: Episode, generator: Noise = None) -> dict[str, Tensor]:
        """`DRAWS` draws of (a, z); every second image finds its own template hidden.

        What is followed is the mean of two bounds: the authors' k-sample one (VIMCO), and the
        one-sample bound (ours). By the first alone it is enough that one draw of k finds the right
        template, and q(a) stays wide where a score allows a single draw.

        The terms' values are the one-sample bound's, averaged over the draws: what `elbo` and, for
        every second image, `left_out` estimate. Their gradient is that of the objective.
        """
        batch, length = episode.shape[:2]
        seen, hidden = self.encoder(episode), own_hidden(length, episode.device)
        held = Templates(episode, seen)
        log_q = self.address_posterior(seen, held, hidden)
        log_p = self.address_prior(held, length, hidden)
        # The draws lie side by side along the episode: (B, k T).
        many = _repeated(DRAWS)
        q, p = many(log_q), many(log_p)
        address = drawn(q.detach(), generator)
        read = held.at(address)
        reading = self.infer(many(seen), read, self._noise(batch, DRAWS * length, generator))
        output = self.decode(reading.readout, read)
        likelihood = self.likelihood.log_prob(output, many(episode))
        log_chance = at(address, q)
        weights = likelihood + at(address, p) - log_chance
        weights = weights + reading.prior.log_prob(reading.readout)
        weights = weights - reading.posterior.log_prob(reading.readout)

        def apart(value: Float[Tensor, "B N"]) -> PerDraw:
            return value.unflatten(1, (DRAWS, length)).transpose(0, 1)

        parts = apart(weights), apart(log_chance)
        objective = (vimco(*parts) + one_sample(*parts)) / 2
        divergence = reading.posterior.kl(reading.prior)
        terms = ElboTerms(
            log_likelihood=apart(likelihood).mean(0).detach() + objective - objective.detach(),
            readout_kl=apart(divergence).mean(0).detach(),
            key_kl=categorical_kl(log_q, log_p).detach(),
        )
        return terms.by_name()

    # Write, append, generate

    def write(self, images: Images, *, generator: Noise = None) -> Memory:
        """Keep the images, pixel for pixel."""
        maps = self.as_episodes(images).flatten(1, 2)
        return Memory(maps if images.ndim == 5 else maps[0])

    def append(self, memory: Memory, images: Images, *, generator: Noise = None) -> Memory:
        """More templates behind those there are."""
        maps = torch.cat([self.as_maps(memory, images), self.as_episodes(images).flatten(1, 2)], 1)
        return Memory(maps if memory.is_batch else maps[0])

    def empty(self, batch: int | None = None) -> Memory:
        """One template of zeros: a choice needs something to choose."""
        lead = () if batch is None else (batch,)
        return Memory(torch.zeros(*lead, *self.memory_shape(1), device=self.device))

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
        """Draw a template from p(a | M), a readout from p(z | m_a), decode its expected pixels;
        or draw those too."""
        memory = self.require_memory(memory)
        self.check_samples(num_samples, near)
        held = self.templates(self.as_maps(memory))
        read = held.at(drawn(self.address_prior(held, num_samples), generator))
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
        steps: int = 10,
        sample: bool = False,
        observed: Observed | None = None,
        generator: Noise = None,
    ) -> Float[Tensor, "S *B T C H W"]:
        """Find the template most like the last picture, decode the mean of p(z | m_a), again:
        every step. `sample=True` draws addresses. q(a | x, M) sees whole pictures: it has no use
        for `observed`. The authors do not iterate."""
        held = self.templates(self.as_maps(memory, cue))

        def look(picture: Episode) -> Episode:
            log_q = self.address_posterior(self.encoder(picture), held)
            read = held.at(drawn(log_q, generator) if sample else log_q.argmax(dim=-1))
            return self.likelihood.mean(self.decode(self.readout_prior(read).mean, read))

        return self.iterate_read(memory, cue, steps, look)

    @torch.no_grad()
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]:
        """Read the likeliest template of the episode, decode the mean of q(z | x, m_a)."""
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
        """ln p(x, z, a | M), from the templates, a and z alone. Keys name templates (`keys_of`);
        `key_log_prior` is ln p(a | M), the chance of that template."""
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
        """ln p(x, z, a | M) - ln q(z, a | x, M), draw by draw."""
        batch, length = episode.shape[:2]
        seen = self.encoder(episode)
        held = Templates(episode, seen)
        log_q = self.address_posterior(seen, held)

        def draw() -> PerImage:
            address = drawn(log_q, generator)
            noise = self._noise(batch, length, generator)
            reading = self.infer(seen, held.at(address), noise)
            joint = self._joint(episode, held, address, reading.readout)
            log_chance = at(address, log_q) + reading.posterior.log_prob(reading.readout)
            return joint.total - log_chance

        return draw

    def left_out(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """Each image among the other T - 1 templates: here more than a control. The authors'
        memories do not hold the target, so this is what compares with their 103.6 (Omniglot)."""
        episode = self.as_pixels(images)
        rest = all_but_one(episode.shape[1], episode.device)  # or says what is wrong
        hidden = torch.eye(len(rest), dtype=torch.bool, device=episode.device)
        seen = self.encoder(episode)  # without temporal shift: each image by itself
        held = Templates(episode, seen)
        log_q = self.address_posterior(seen, held, hidden)
        log_p = self.address_prior(held, len(held), hidden)
        terms = self._terms(episode, seen, held, log_q, log_p, True, generator)
        return terms if images.ndim == 5 else terms[0]

    def permuted(self, images: Images, *, generator: Noise = None) -> ElboTerms:
        """Each image read where its neighbour's q(a) points (a control)."""
        episode = self.as_pixels(images)
        seen = self.encoder(episode)
        held = Templates(episode, seen)
        log_q = self.address_posterior(seen, held).roll(1, dims=1)
        log_p = self.address_prior(held, len(held))
        terms = self._terms(episode, seen, held, log_q, log_p, True, generator)
        return terms if images.ndim == 5 else terms[0]


def own_hidden(length: int, device: torch.device) -> Hidden:
    """Every second image must do without its own template; a lone image keeps it."""
    hidden = torch.eye(length, dtype=torch.bool, device=device)
    odd = torch.arange(length, device=device) % 2 == 1
    return hidden & odd[:, None]


def _without(scores: LogChances, hidden: Hidden | None) -> LogChances:
    """Scores with hidden templates out of reach."""
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def _repeated(times: int) -> Callable[[Tensor], Tensor]:
    """An episode so many times over, one after the other: (B, T, ...) to (B, times T, ...)."""
    return lambda value: value.repeat(1, times, *[1] * (value.ndim - 2))
