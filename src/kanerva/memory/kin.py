"""Reading for what is not written: what all blocks of a memory together tell of another image.

p(z | M, new) sees every block that is held, in any order and any number. Which blocks are read
depends on the memory alone, so what is scored cannot choose them.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kanerva.layers.residual import zeroed

_WIDTH, _LAYERS, _HEADS, _QUERIES = 128, 2, 4, 4  # ours


class KinReader(nn.Module):
    """Blocks of a memory to one trace, as if a block were read; zeros where nothing is held."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(numbers, _WIDTH)
        self.nothing = nn.Parameter(0.02 * torch.randn(1, 1, _WIDTH))  # so that none is no error
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(
                    _WIDTH, _HEADS, 2 * _WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
                )
                for _ in range(_LAYERS)
            ]
        )
        self.queries = nn.Parameter(0.02 * torch.randn(1, _QUERIES, _WIDTH))
        self.pool = nn.MultiheadAttention(_WIDTH, _HEADS, batch_first=True)
        self.norm = nn.LayerNorm(_QUERIES * _WIDTH)
        self.last = zeroed(nn.Linear(_QUERIES * _WIDTH, numbers))

    def forward(
        self, blocks: Float[Tensor, "B S D"], held: Bool[Tensor, "B S"]
    ) -> Float[Tensor, "B D"]:
        """What a new image is expected to be like."""
        count = len(blocks)
        tokens = torch.cat([self.nothing.expand(count, -1, -1), self.embed(blocks)], dim=1)
        hidden = torch.cat([torch.zeros_like(held[:, :1]), ~held], dim=1)  # from attention
        for layer in self.layers:
            tokens = layer(tokens, src_key_padding_mask=hidden)
        queries = self.queries.expand(count, -1, -1)
        pooled = self.pool(queries, tokens, tokens, key_padding_mask=hidden, need_weights=False)[0]
        found = self.last(self.norm(pooled.flatten(1))).float()
        return found * held.any(dim=1, keepdim=True)
