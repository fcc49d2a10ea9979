"""`dnc`: the differentiable neural computer (Graves et al. 2016) as the memory of an episode.

    memory = model.write(images)                # a controller writes one code after another
    steps = model.recall(memory, noisy)
    samples = model.generate(memory, 64)
    terms = model.elbo(images)

Content addressing, allocation by usage, temporal links and several read heads are the paper's
(`memory/dnc_access.py`); the encoder, the decoder and the bound are those of the other models. The
generative side is p(y) = N(0, 1), p(z | reads, y) and p(x | z). What it reads of an episode is the
slots M and the links L as the last write left them, nothing else: usage and precedence serve
writing alone, and a read controller starts afresh for each image, with y and no embedding.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.config import ModelConfig
from kanerva.decoder import Decoder
from kanerva.distributions import DiagonalNormal, mapped
from kanerva.encoder import EpisodeEncoder
from kanerva.errors import UserError
from kanerva.layers.dense import deep_linear
from kanerva.memory.heap import Memory
from kanerva.models.base import ElboTerms, Images, JointDensity, MemoryModel, Weigh, all_but_one
from kanerva.models.rivals.dnc_access import (
    AccessState,
    content_weights,
    interface_sizes,
    oneplus,
    parse_interface,
    read,
    step,
)
from kanerva.readout import ReadoutPosterior
from kanerva.shapes import Embedding, Episode, MemoryMap, PerImage, Readout

KEY = 8  # ours: numbers of y, from which an image's reads follow
STRENGTH = 9.0  # ours: what a read strength's logit starts from; its content weights are then sharp
STEPS = 2  # ours: reads of one image; the first finds by content, the next may follow links
CONTROLLER = 128  # ours: hidden numbers of the controllers, for writing and for reading

Keys = Float[Tensor, "B T Y"]
Reads = Float[Tensor, "B T R W"]
Hidden = Float[Tensor, "B hidden"]


class WriteController(nn.Module):
    """An LSTM that is shown codes in turn, and its last reads, and asks for what the paper's
    interface offers."""

    def __init__(self, slots: int, width: int, heads: int) -> None:
        super().__init__()
        self.slots, self.width, self.heads = slots, width, heads
        sizes = interface_sizes(width, heads)
        self.cell = nn.LSTMCell(width + heads * width, CONTROLLER)
        # ours: the code goes past the LSTM as well, so that a slot can hold it as it is
        self.ask = nn.Linear(CONTROLLER + width, sum(sizes.values()))
        with torch.no_grad():  # ours: to begin with, each code as it is into a slot of its own
            parts = dict(zip(sizes, self.ask.bias.split(list(sizes.values())), strict=True))
            for name, value in (
                ("write_gate", 2.0),
                ("allocation_gate", 2.0),
                ("free_gates", -2.0),
            ):
                parts[name].fill_(value)
            weights = dict(zip(sizes, self.ask.weight.split(list(sizes.values())), strict=True))
            weights["add"][:, CONTROLLER:] += torch.eye(width)

    @torch.compiler.disable(recursive=False)  # unrolled over T it takes minutes: `one_more` is
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, codes: Float[Tensor, "B T W"]
    ) -> AccessState:
        """The state after all codes, from a blank one."""
        batch, device = len(codes), codes.device
        state = AccessState.zeros(batch, self.slots, self.width, self.heads, device=device)
        hidden = cell = codes.new_zeros(batch, CONTROLLER)
        for code in codes.unbind(1):
            hidden, cell, state = self.one_more(code.contiguous(), hidden, cell, state)
        return state

    def one_more(
        self, code: Float[Tensor, "B W"], hidden: Hidden, cell: Hidden, state: AccessState
    ) -> tuple[Hidden, Hidden, AccessState]:
        """Show the controller one code; do what it asks for."""
        seen = torch.cat([code, state.reads.flatten(1)], dim=-1)
        hidden, cell = self.cell(seen, (hidden, cell))
        asked = self.ask(torch.cat([hidden, code], dim=-1))
        return hidden, cell, step(state, parse_interface(asked, self.width, self.heads))


class ReadController(nn.Module):
    """A feed-forward controller: y and the reads of the step before in, the next reads out.

    The heads of all images read side by side. None writes, so none sees what another did.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.hidden = nn.Linear(KEY + heads * width, CONTROLLER)
        self.ask = nn.Linear(CONTROLLER, heads * (width + 4))  # key, strength, modes of each head
        with torch.no_grad():
            self.ask.bias.view(heads, width + 4)[:, width] = STRENGTH

    def forward(
        self, memory: Float[Tensor, "B N W"], links: Float[Tensor, "B N N"], keys: Keys
    ) -> Reads:
        """What the last of `STEPS` reads finds for each key."""
        batch, length = keys.shape[:2]
        reads = memory.new_zeros(batch, length, self.heads, self.width)
        # ours: a head looks first of all for the slot whose code begins with y
        named = F.pad(keys, (0, self.width + 4 - KEY))[:, :, None]
        weights = None  # a head has not been anywhere yet
        for _ in range(STEPS):
            hidden = F.silu(self.hidden(torch.cat([keys, reads.flatten(2)], dim=-1)))
            asked = self.ask(hidden).unflatten(-1, (self.heads, -1)) + named
            asked = asked.flatten(1, 2)  # (B, T R, W + 4)
            query, strengths = asked[..., :-4], oneplus(asked[..., -4])
            if weights is None:
                weights = content_weights(memory, query, strengths)
            else:
                modes = asked[..., -3:].softmax(-1)
                weights = read(memory, links, weights, query, strengths, modes)
            reads = (weights @ memory).view(batch, length, self.heads, self.width)
        return reads


class DifferentiableNeuralComputer(MemoryModel):
    """A DNC that writes an episode, is then held still, and is read once for each image."""

    reconstructed = "reconstructed: q(z|x), the memory not used"
    in_turn = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        rows, size = config.rows, config.readout.size
        self.encoder = EpisodeEncoder(config.encoder, channels)
        embedding = self.encoder.features
        if rows.width <= KEY:
            raise UserError(f"dnc: rows.width must exceed the {KEY} of a key, got {rows.width}")
        self.code = nn.Linear(embedding, rows.width - KEY)
        self.writer = WriteController(rows.count, rows.width, rows.heads)
        self.reader = ReadController(rows.width, rows.heads)
        self.key_net = deep_linear(embedding, config.keys.hidden, 2 * KEY, config.keys.layers)
        self.key_norm = nn.BatchNorm1d(KEY, affine=False)
        self.readout_posterior = ReadoutPosterior(config.readout, embedding)
        self.readout_prior = nn.Sequential(
            nn.Linear(rows.heads * rows.width + KEY, config.readout.hidden),
            nn.SiLU(),
            nn.Linear(config.readout.hidden, 2 * size),
        )
        outputs = self.likelihood.outputs(channels)
        self.decoder = Decoder(config.decoder, size, outputs, height, width)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (KEY,)

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        """Beside its W numbers, row i has the N links that lead to slot i."""
        rows = self.config.rows
        return (1, rows.count, rows.width + rows.count)

    # What p says

    def traces(self, maps: MemoryMap, keys: Keys) -> Reads:
        """The R vectors that a key's heads read last."""
        with torch.autocast(maps.device.type, enabled=False):
            width = self.config.rows.width
            rows = maps[:, 0].float()
            return self.reader(rows[..., :width], rows[..., width:], keys.float())

    def read_maps(self, maps: MemoryMap, keys: Keys) -> DiagonalNormal:
        """p(z | reads, y)."""
        known = torch.cat([self.traces(maps, keys).flatten(2), keys], dim=-1)
        return DiagonalNormal.from_network(self.readout_prior(known))

    def joint(
        self, episode: Episode, maps: MemoryMap, keys: Keys, readout: Readout
    ) -> JointDensity:
        """ln p(x, z, y | M), from M, y and z alone."""
        return JointDensity(
            log_likelihood=self.likelihood.log_prob(self.decoder(readout), episode),
            readout_log_prior=self.read_maps(maps, keys).log_prob(readout),
            key_log_prior=DiagonalNormal.standard_like(keys).log_prob(keys),
        )

    # What q says

    def key_posterior(self, embedding: Embedding) -> DiagonalNormal:
        """q(y | x), its means of unit variance over a batch: ours. Else y dies before reads are
        worth its price, all images of an episode read the same, and nothing wakes it again."""
        said = DiagonalNormal.from_network(self.key_net(embedding))
        with torch.autocast(embedding.device.type, enabled=False):
            mean = self.key_norm(said.mean.flatten(0, 1)).view_as(said.mean)
        return DiagonalNormal(mean, said.log_std)

    # Write

    def written(self, embedding: Embedding, q_keys: DiagonalNormal) -> MemoryMap:
        """All that p reads of an episode: slots and links after the last write.

        A code begins with the mean of q(y | x), by which it can be found. (Never a sample: p would
        then know the key that a read uses.)
        """
        content = self.code(embedding)
        with torch.autocast(content.device.type, enabled=False):
            state = self.writer(torch.cat([q_keys.mean, content.float()], dim=-1))
            return self.settled(torch.cat([state.memory, state.links], dim=-1)[:, None])

    def write(self, images: Images, *, generator: torch.Generator | None = None) -> Memory:
        """Show the controller each image in turn; no noise is drawn."""
        embedding = self.encoder(self.as_episodes(images))
        maps = self.written(embedding, self.key_posterior(embedding))
        return Memory(maps if images.ndim == 5 else maps[0])

    def empty(self, batch: int | None = None) -> Memory:
        """Blank slots without links: the state before any write."""
        lead = () if batch is None else (batch,)
        return Memory(torch.zeros(*lead, *self.memory_shape(0), device=self.device))

    # The bound

    def elbo(
        self,
        images: Images,
        memory: Memory | None = None,
        *,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> ElboTerms:
        """ln p(x|z), KL[q(z|x) || p(z | reads, y)], KL[q(y|x) || N(0, 1)]: one sample of each
        latent; `sample=False` takes posterior means instead (not a bound)."""
        episode = self.as_pixels(images)
        embedding = self.encoder(episode)
        q_keys = self.key_posterior(embedding)
        maps = self.written(embedding, q_keys) if memory is None else self.as_maps(memory, images)
        terms = self._terms(episode, embedding, maps, q_keys, sample, generator)
        return terms if images.ndim == 5 else terms[0]

    def _terms(
        self,
        episode: Episode,
        embedding: Embedding,
        maps: MemoryMap,
        q_keys: DiagonalNormal,
        sample: bool,
        generator: torch.Generator | None,
    ) -> ElboTerms:
        q_readout = self.readout_posterior(embedding)
        keys = q_keys.sample(generator) if sample else q_keys.mean
        readout = q_readout.sample(generator) if sample else q_readout.mean
        return ElboTerms(
            log_likelihood=self.likelihood.log_prob(self.decoder(readout), episode),
            readout_kl=q_readout.kl(self.read_maps(maps, keys)),
            key_kl=q_keys.kl_to_prior(),
        )

    def weighing(self, episode: Episode, generator: torch.Generator | None) -> Weigh:
        """ln p(x, z, y | M) - ln q(z, y | x), draw by draw."""
        embedding = self.encoder(episode)
        q_keys, q_readout = self.key_posterior(embedding), self.readout_posterior(embedding)
        maps = self.written(embedding, q_keys)

        def draw() -> PerImage:
            keys, readout = q_keys.sample(generator), q_readout.sample(generator)
            joint = self.joint(episode, maps, keys, readout)
            return joint.total - q_keys.log_prob(keys) - q_readout.log_prob(readout)

        return draw

    # Controls

    def left_out(self, images: Images, *, generator: torch.Generator | None = None) -> ElboTerms:
        """Each image under a memory in which all others of its episode were written (a control):
        T writings of T - 1 images, side by side."""
        episode = self.as_pixels(images)
        batch, length = episode.shape[:2]
        rest = all_but_one(length, episode.device)
        embedding = self.encoder(episode)  # without temporal shift: each image by itself
        q_keys = self.key_posterior(embedding)
        others = mapped(q_keys, lambda value: value[:, rest].flatten(0, 1))
        maps = self.written(embedding[:, rest].flatten(0, 1), others)  # (B T, ...)
        single, alone = (value.flatten(0, 1)[:, None] for value in (episode, embedding))
        q_keys = mapped(q_keys, lambda value: value.flatten(0, 1)[:, None])
        terms = self._terms(single, alone, maps, q_keys, True, generator)
        shape = (batch, length) if images.ndim == 5 else (length,)
        return terms.view(shape)

    def permuted(self, images: Images, *, generator: torch.Generator | None = None) -> ElboTerms:
        """Each image read at its neighbour's key (a control)."""
        episode = self.as_pixels(images)
        embedding = self.encoder(episode)
        q_keys = self.key_posterior(embedding)
        maps = self.written(embedding, q_keys)
        rolled = mapped(q_keys, lambda value: value.roll(1, dims=1))
        terms = self._terms(episode, embedding, maps, rolled, True, generator)
        return terms if images.ndim == 5 else terms[0]

    # Generate, read, recall

    @torch.no_grad()
    def generate(
        self,
        memory: Memory | None,
        num_samples: int,
        *,
        near: tuple[Float[Tensor, "*key"], float] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "*B T C H W"]:
        """Draw y from its prior, read, draw z, decode its expected pixels.

        `near=(key, spread)` draws keys around one instead: y + spread * noise.
        """
        memory = self.given(memory)
        maps, keys = self.prior_keys(memory, num_samples, near, generator)
        readout = self.read_maps(maps, keys).sample(generator)
        images = self.likelihood.mean(self.decoder(readout))
        return images if memory.is_batch else images[0]

    def read(self, memory: Memory, keys: Float[Tensor, "*B T Y"]) -> DiagonalNormal:
        """The learned prior p(z | reads, y), (B, T, L); B = 1 for one episode."""
        maps, keys = self.as_maps(memory), keys if keys.ndim == 3 else keys[None]
        if keys.shape[0] != len(maps) or keys.shape[2] != KEY:
            raise UserError(f"keys {tuple(keys.shape)} do not fit memory {tuple(maps.shape)}")
        return self.read_maps(maps, keys)

    @torch.no_grad()
    def recall(
        self,
        memory: Memory,
        cue: Images,
        *,
        steps: int = 10,
        sample: bool = False,
        observed: Float[Tensor, "*B T H W"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "S *B T C H W"]:
        """Hold M; infer y from the last picture, read, decode, again: every step. q(y | x) sees
        whole pictures: it has no use for `observed`. Means, unless `sample` asks for drawn keys."""
        maps = self.as_maps(memory, cue)

        def read(picture: Episode) -> Episode:
            posterior = self.key_posterior(self.encoder(picture))
            keys = posterior.sample(generator) if sample else posterior.mean
            return self.likelihood.mean(self.decoder(self.read_maps(maps, keys).mean))

        return self.again(memory, cue, steps, read)

    @torch.no_grad()
    def reconstruct(self, images: Images) -> Float[Tensor, "*B T C H W"]:
        """Decode the mean of q(z|x): the memory takes no part in it."""
        posterior = self.readout_posterior(self.encoder(self.as_episodes(images)))
        pixels = self.likelihood.mean(self.decoder(posterior.mean))
        return pixels if images.ndim == 5 else pixels[0]
