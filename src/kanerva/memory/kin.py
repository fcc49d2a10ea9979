"""Kin: predict an image that is not stored from the blocks of a memory, a few together.

p(z | M, new) and p(x | M, new) see stored blocks, in any order: the image itself if the block
stores all of it, else its gist. Of a memory of more than `GROUP` blocks, both are mixtures: each
block predicts, together with those most like it. Which blocks are read together depends on the
memory alone, not on the image that is scored.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kanerva.layers.residual import zeroed
from kanerva.shapes import FeatureMaps

GROUP = 5  # ours: blocks that are read together. A larger memory is a mixture of such groups
TRIED = 64  # groups that an image's likelihood sums; leaving out others only lowers it
NEW = 32  # ours: "new" is as likely as this many stored blocks, and at least as all of them
UNLIKE = 0.25  # p(the image is unrelated to what is stored | M, new)
_WIDTH, _LAYERS, _HEADS = 128, 3, 4  # ours

Expected = Float[Tensor, "B maps Hq Wq"]  # what a new image is expected to look like


class KinReader(nn.Module):
    """Predicts maps of a new image from the blocks of a memory; zeros if the memory is empty. Every
    position of the maps attends to every position of every block."""

    def __init__(self, features: int, gist_maps: int, side: tuple[int, int], outputs: int) -> None:
        super().__init__()
        self.side = side
        self.see = nn.Linear(features, _WIDTH)
        self.guess = nn.Linear(gist_maps, _WIDTH)
        # Both start as the same waves, so that a query attends to its own place before it has
        # learned anything. With random starts, learning to do so takes most of a short run.
        self.place = nn.Parameter(waves(side, _WIDTH))
        self.queries = nn.Parameter(waves(side, _WIDTH)[None])
        self.nothing = nn.Parameter(0.02 * torch.randn(1, 1, _WIDTH))  # an always visible token
        self.layers = nn.ModuleList([_Attend() for _ in range(_LAYERS)])
        self.norm = nn.LayerNorm(_WIDTH)
        self.last = zeroed(nn.Linear(_WIDTH, outputs))

    def forward(
        self,
        features: FeatureMaps,
        gists: Float[Tensor, "B T G Hq Wq"],
        whole: Bool[Tensor, "B T"],
        held: Bool[Tensor, "R T"],
    ) -> Float[Tensor, "R maps Hq Wq"]:
        """Attend to `features` of the images that are stored as a `whole`, and to `gists`, at the
        same resolution, of the others. `held`: which of the T blocks a memory holds, for one or
        several memories of each row of blocks."""
        from_image, from_gist = self.see(features.flatten(3).mT), self.guess(gists.flatten(3).mT)
        tokens = torch.where(whole[..., None, None], from_image, from_gist) + self.place
        tokens = torch.cat([self.nothing.expand(len(whole), -1, -1), tokens.flatten(1, 2)], dim=1)
        visible = held.repeat_interleave(len(self.place), dim=1)
        visible = torch.cat([held.new_ones(len(held), 1), visible], dim=1)
        x = self.queries.expand(len(held), -1, -1)
        for layer in self.layers:
            x = layer(x, tokens, visible)
        expected = self.last(self.norm(x)).float().mT.unflatten(-1, self.side)
        return expected * held.any(dim=1)[:, None, None, None]


def waves(side: tuple[int, int], width: int) -> Float[Tensor, "n W"]:
    """An embedding of places: sines and cosines of row and column, from the wavelength of two
    places to that of four times the side."""
    rows, columns = torch.meshgrid(*[torch.arange(size) for size in side], indexing="ij")
    shortest, longest = 2.0, 4.0 * max(side)
    steps = torch.linspace(math.log(shortest), math.log(longest), width // 4)
    angles = [at.flatten()[:, None] * 2 * math.pi / steps.exp() for at in (rows, columns)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)


class _Attend(nn.Module):
    """A transformer layer: queries attend to tokens and to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.query, self.pair = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 2 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, 2 * _WIDTH),
            nn.GELU(),
            nn.Linear(2 * _WIDTH, _WIDTH),
        )

    def forward(
        self,
        x: Float[Tensor, "R n W"],
        tokens: Float[Tensor, "B m W"],
        visible: Bool[Tensor, "R m"],
    ) -> Float[Tensor, "R n W"]:
        x_in = self.norm(x)
        others = self.pair(self.before(tokens)).repeat_interleave(len(x) // len(tokens), dim=0)
        keys, values = torch.cat([others, self.pair(x_in)], dim=1).chunk(2, dim=-1)
        mask = torch.cat([visible, visible.new_ones(x.shape[:2])], dim=1)
        heads = [part.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for part in (keys, values)]
        query = self.query(x_in).unflatten(-1, (_HEADS, -1)).transpose(1, 2)
        found = F.scaled_dot_product_attention(query, *heads, attn_mask=mask[:, None, None])
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


# Groups of alike blocks


def most_alike(expected: Expected, size: int, of: Int[Tensor, " n"]) -> Int[Tensor, "n _"]:
    """For each of some blocks, itself and the blocks from which the reader expects the most similar
    new images, given what it expects from each block alone."""
    flat = expected.flatten(1)
    apart = torch.cdist(flat[of], flat).scatter(1, of[:, None], -1)
    return apart.topk(min(size, len(flat)), largest=False).indices


# The cost of a key


def key_costs(held: Int[Tensor, " B"], written: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """-ln p(y | M). Blocks that are `held` are equally likely. "New" is as likely as `NEW` of them,
    or as all of them if there are more. So in an empty memory it is certain."""
    held = held[:, None].double()
    new = held.clamp(min=NEW)
    return (held + new).log() - torch.where(written, 0.0, new.log())


def new_costs(held: Int[Tensor, " B"], like: bool) -> Float[Tensor, "B 1"]:
    """-ln p(y | M) of a new image that is related (`like`) to the `held` stored ones, or unrelated.
    In an empty memory "new and unrelated" is certain."""
    new = key_costs(held, torch.zeros_like(held[:, None], dtype=torch.bool))
    if_empty = torch.inf if like else 0.0
    share = 1 - UNLIKE if like else UNLIKE
    return torch.where(held[:, None] > 0, new - math.log(share), if_empty)


def mix_unlike(
    like: Float[Tensor, "B T"], unlike: Float[Tensor, "B T"], held: Int[Tensor, " B"]
) -> Float[Tensor, "B T"]:
    """ln p(x | M, new): mix ln p(x) for images related to the stored ones (`like`), and others."""
    mixed = torch.logaddexp(like + math.log1p(-UNLIKE), unlike + math.log(UNLIKE))
    return torch.where(held[:, None] > 0, mixed, unlike)
