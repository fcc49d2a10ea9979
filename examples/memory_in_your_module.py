"""The memory inside a module of your own: remember pairs, then answer from a cue.

An episode is four pairs of a cue and a value (random vectors). Your network embeds each pair, the
library's writer turns the episode into one small map, and the library's keys and block reads bring
back what a cue alone points at. Everything is differentiable, so it trains end to end.

    python examples/memory_in_your_module.py [steps]
"""

import sys

import torch
from torch import nn

from kanerva.config import KeyConfig, MemoryConfig
from kanerva.memory import KeyNetwork, PooledWriter, read_blocks, window

CUE, VALUE, PAIRS = 4, 2, 4


class Remember(nn.Module):
    """Write pairs (B, T, cue + value), answer cues (B, T, cue) with values (B, T, value)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        memory = MemoryConfig(channels=4, size=16, reads=2, block=8, base=64)
        self.block = memory.block
        self.embed_pair = nn.Sequential(
            nn.Linear(CUE + VALUE, width), nn.ReLU(), nn.Linear(width, width)
        )
        self.embed_cue = nn.Sequential(nn.Linear(CUE, width), nn.ReLU())
        self.writer = PooledWriter(memory, width)
        self.keys = KeyNetwork(KeyConfig(hidden=width), width, memory.reads)
        traces = memory.reads * memory.channels * memory.block**2
        self.answer = nn.Sequential(
            nn.Linear(traces + width, 128), nn.ReLU(), nn.Linear(128, VALUE)
        )

    def forward(self, cues: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        memory = self.writer(self.embed_pair(torch.cat([cues, values], dim=-1)))  # (B, 4, 16, 16)
        asked = self.embed_cue(cues)
        keys = self.keys(asked).mean  # where to look: (B, T, K, 3)
        traces = read_blocks(memory, window(keys), self.block)  # (B, T, K, 4, 8, 8)
        return self.answer(torch.cat([traces.flatten(2), asked], dim=-1))


def main(steps: int = 600) -> float:
    torch.manual_seed(0)
    model = Remember()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        cues, values = torch.randn(64, PAIRS, CUE), torch.randn(64, PAIRS, VALUE)
        loss = (model(cues, values) - values).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:4d}: mean squared error {loss.item():.3f} (1.0 is a guess)")
    return loss.item()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
