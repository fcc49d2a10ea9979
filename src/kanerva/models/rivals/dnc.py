"""`dnc`: the differentiable neural computer (Graves et al. 2016) as the memory of an episode.

Content addressing, allocation by usage, temporal links and several read heads are the paper's
(`dnc_access.py`); the encoder, the decoder and the bound are those of the other models. The
generative side is p(y) = N(0, 1), p(z | reads, y) and p(x | z). What it reads of an episode is the
slots M and the links L as the last write left them, nothing else: usage and precedence serve
writing alone, and a read controller starts afresh for each image, with y and no embedding.
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
            for name in ("write_gate", "allocation_gate"):
                parts[name].fill_(2.0)
            parts["free_gates"].fill_(-2.0)
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


class DifferentiableNeuralComputer(LatentModel):
    """A DNC that writes an episode, is then held still, and is read once for each image."""

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
            raise UserError(f"dnc: rows.width must exceed the {KEY} of a key, got {rows.width}")
        self.code = nn.Linear(embedding, rows.width - KEY)
        self.writer = WriteController(rows.count, rows.width, rows.heads)
        self.reader = ReadController(rows.width, rows.heads)
        self.key_net = deep_linear(embedding, config.keys.hidden, 2 * KEY)
        self.key_norm = nn.BatchNorm1d(KEY, affine=False)
        self.readout_posterior = ReadoutPosterior(config.readout, embedding)
        known = rows.heads * rows.width + KEY
        self.readout_prior = one_hidden(known, config.readout.hidden, 2 * size)
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

    # What q says

    def key_posterior(self, features: Embedding, maps: MemoryMap | None = None) -> DiagonalNormal:
        """q(y | x), its means of unit variance over a batch: ours. Else y dies before reads are
        worth its price, all images of an episode read the same, and nothing wakes it again."""
        said = DiagonalNormal.from_network(self.key_net(features))
        with torch.autocast(features.device.type, enabled=False):
            mean = self.key_norm(said.mean.flatten(0, 1)).view_as(said.mean)
        return DiagonalNormal(mean, said.log_std)

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
        """Show the controller each image in turn; no noise is drawn. What p reads of an episode is
        slots and links after the last write.

        A code begins with the mean of q(y | x), by which it can be found. (Never a sample: p would
        then know the key that a read uses.)
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
