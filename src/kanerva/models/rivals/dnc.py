"""`dnc`: the differentiable neural computer (Graves et al. 2016) as the memory of an episode.

Content addressing, allocation by usage, temporal links and several read heads are the paper's
(`dnc_access.py`); the encoder, the decoder and the bound are those of the other models. The
generative side is p(y) = N(0, 1), p(z | reads, y) and p(x | z). It sees an episode only through the
slots M and the links L after the last write. Usage and precedence are for writing only, and the
read controller starts anew for each image, with y as input and no embedding.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.config import DncConfig
from kanerva.decoder import Decoder
from kanerva.distributions import DiagonalNormal
from kanerva.encoder import EpisodeEncoder
from kanerva.errors import UserError
from kanerva.layers.dense import deep_linear, one_hidden
from kanerva.models.latent import LatentModel
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
from kanerva.seeding import Noise
from kanerva.shapes import Embedding, Episode, MemoryMap

KEY = 8  # ours: size of y, from which an image's reads are computed
STRENGTH = 9.0  # ours: initial logit of a read strength, so that content weights start sharp
STEPS = 2  # ours: reads of one image; the first is by content, the next may follow links
CONTROLLER = 128  # ours: hidden units of the write and read controllers

Keys = Float[Tensor, "B T Y"]
Reads = Float[Tensor, "B T R W"]
Hidden = Float[Tensor, "B hidden"]


class WriteController(nn.Module):
    """An LSTM over the codes of an episode. Its input is a code and the last reads, its output the
    paper's interface vector."""

    def __init__(self, slots: int, width: int, heads: int) -> None:
        super().__init__()
        self.slots, self.width, self.heads = slots, width, heads
        sizes = interface_sizes(width, heads)
        self.cell = nn.LSTMCell(width + heads * width, CONTROLLER)
        # ours: the code also bypasses the LSTM, so that a slot can store it unchanged
        self.ask = nn.Linear(CONTROLLER + width, sum(sizes.values()))
        with torch.no_grad():  # ours: initially, each code is written unchanged to its own slot
            parts = dict(zip(sizes, self.ask.bias.split(list(sizes.values())), strict=True))
            for name in ("write_gate", "allocation_gate"):
                parts[name].fill_(2.0)
            parts["free_gates"].fill_(-2.0)
            weights = dict(zip(sizes, self.ask.weight.split(list(sizes.values())), strict=True))
            weights["add"][:, CONTROLLER:] += torch.eye(width)

    # Compiling the loop, unrolled over T, would take minutes. Only `write_one` is compiled.
    @torch.compiler.disable(recursive=False)
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, codes: Float[Tensor, "B T W"]
    ) -> AccessState:
        """Write all codes to a blank state, one after another."""
        batch, device = len(codes), codes.device
        state = AccessState.zeros(batch, self.slots, self.width, self.heads, device=device)
        hidden = cell = codes.new_zeros(batch, CONTROLLER)
        for code in codes.unbind(1):
            hidden, cell, state = self.write_one(code.contiguous(), hidden, cell, state)
        return state

    def write_one(
        self, code: Float[Tensor, "B W"], hidden: Hidden, cell: Hidden, state: AccessState
    ) -> tuple[Hidden, Hidden, AccessState]:
        """Write one code: a step of the LSTM, then one of the memory."""
        inputs = torch.cat([code, state.reads.flatten(1)], dim=-1)
        hidden, cell = self.cell(inputs, (hidden, cell))
        interface = self.ask(torch.cat([hidden, code], dim=-1))
        return hidden, cell, step(state, parse_interface(interface, self.width, self.heads))


class ReadController(nn.Module):
    """A feed-forward controller, from y and the reads of the step before to the next reads.

    All images are read in parallel. Reads do not write, so they do not affect each other.
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
        """The last of `STEPS` reads for each key."""
        batch, length = keys.shape[:2]
        reads = memory.new_zeros(batch, length, self.heads, self.width)
        # ours: y is added to the query, because the code of a slot begins with a key
        y = F.pad(keys, (0, self.width + 4 - KEY))[:, :, None]
        weights = None  # there are no last read weights in the first step
        for _ in range(STEPS):
            hidden = F.silu(self.hidden(torch.cat([keys, reads.flatten(2)], dim=-1)))
            interface = self.ask(hidden).unflatten(-1, (self.heads, -1)) + y
            interface = interface.flatten(1, 2)  # (B, T R, W + 4)
            query, strengths = interface[..., :-4], oneplus(interface[..., -4])
            if weights is None:
                weights = content_weights(memory, query, strengths)
            else:
                modes = interface[..., -3:].softmax(-1)
                weights = read(memory, links, weights, query, strengths, modes)
            reads = (weights @ memory).view(batch, length, self.heads, self.width)
        return reads


class DifferentiableNeuralComputer(LatentModel):
    """A DNC that writes an episode, is then kept fixed, and is read once for each image."""

    reconstructed = "reconstructed: q(z|x), the memory not used"
    writes_sequentially = True
    config: DncConfig
    encoder: EpisodeEncoder

    def __init__(self, config: DncConfig) -> None:
        super().__init__(config)
        channels, height, width = config.image
        rows, size = config.rows, config.readout.size
        self.encoder = EpisodeEncoder(config.encoder, channels)
        embedding = self.encoder.features
        if rows.width <= KEY:
            raise UserError(f"dnc: rows.width must exceed the key size {KEY}, got {rows.width}")
        self.code = nn.Linear(embedding, rows.width - KEY)
        self.writer = WriteController(rows.count, rows.width, rows.heads)
        self.reader = ReadController(rows.width, rows.heads)
        self.key_net = deep_linear(embedding, config.keys.hidden, 2 * KEY)
        self.key_norm = nn.BatchNorm1d(KEY, affine=False)
        self.readout_posterior = ReadoutPosterior(config.readout, embedding)
        inputs = rows.heads * rows.width + KEY
        self.readout_prior = one_hidden(inputs, config.readout.hidden, 2 * size)
        outputs = self.likelihood.outputs(channels)
        self.decoder = Decoder(config.decoder, size, outputs, height, width)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return (KEY,)

    def memory_shape(self, length: int) -> tuple[int, int, int]:
        """Row i has the W numbers of slot i, then row i of the links (N numbers)."""
        rows = self.config.rows
        return (1, rows.count, rows.width + rows.count)

    # The generative side p

    def traces(self, maps: MemoryMap, keys: Keys) -> Reads:
        """The last read vectors of the R heads for each key."""
        with torch.autocast(maps.device.type, enabled=False):
            width = self.config.rows.width
            rows = maps[:, 0].float()
            return self.reader(rows[..., :width], rows[..., width:], keys.float())

    def read_maps(self, maps: MemoryMap, keys: Keys) -> DiagonalNormal:
        """p(z | reads, y)."""
        inputs = torch.cat([self.traces(maps, keys).flatten(2), keys], dim=-1)
        return DiagonalNormal.from_network(self.readout_prior(inputs))

    # The posteriors q

    def key_posterior(self, features: Embedding, maps: MemoryMap | None = None) -> DiagonalNormal:
        """q(y | x). ours: its means are normalised to unit variance over a batch. Otherwise q
        collapses to the prior before reads are worth its KL; then all images of an episode read the
        same, and there is no gradient to undo it."""
        output = DiagonalNormal.from_network(self.key_net(features))
        with torch.autocast(features.device.type, enabled=False):
            mean = self.key_norm(output.mean.flatten(0, 1)).view_as(output.mean)
        return DiagonalNormal(mean, output.log_std)

    def readout_posterior_at(self, features: Embedding, prior: DiagonalNormal) -> DiagonalNormal:
        return self.readout_posterior(features)

    # Write

    def write_episode(
        self,
        episode: Episode,
        features: Embedding,
        *,
        sample: bool = True,
        generator: Noise = None,
    ) -> tuple[MemoryMap, DiagonalNormal]:
        """Write the images one after another, deterministically. The map has the slots and links
        after the last write.

        A code begins with the mean of q(y | x), so that it can be found by content. It must not be
        a sample: p would then know the key that a read uses.
        """
        keys = self.key_posterior(features)
        content = self.code(features)
        with torch.autocast(content.device.type, enabled=False):
            state = self.writer(torch.cat([keys.mean, content.float()], dim=-1))
            maps = torch.cat([state.memory, state.links], dim=-1)[:, None]
        return self.quantised(maps), keys

    def write_maps(
        self, episode: Episode, features: Embedding, *, sample: bool = True, generator: Noise = None
    ) -> MemoryMap:
        return self.write_episode(episode, features)[0]
