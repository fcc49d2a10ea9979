"""A memory inside a module of your own: remember pairs as they come, revise some, answer cues.

A stream of eight pairs (cue, value) of random vectors; then four of the cues come again with a new
value. Asked for a cue, the module must answer its newest value. With a `BlockMemory` it keeps the
facts that hold: where a cue comes again, the block that a read finds is freed and the new pair
written. Beside it, the same network with attention over everything that came, marked with when it
came: plain, and with queries and keys normalised as a `BlockMemory` does; and with a GRU, whose
state is all it remembers. Freeing saves room here (eight blocks, however often a cue comes again),
not error: normalised attention, which keeps all twelve, answers as well.

    python examples/memory_in_your_module.py [steps]
"""

import sys
from collections.abc import Callable

import kanerva

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CUE, VALUE, PAIRS, REVISED, WIDTH = 8, 4, 8, 4, 32


class WithMemory(nn.Module):
    """Facts that hold, one block each."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = kanerva.BlockMemory(features=WIDTH, blocks=PAIRS)

    def forward(self, pairs: Tensor, cues: Tensor, asked: Tensor) -> Tensor:
        """Pairs in order of arrival, the cue of each alone, and what is asked at the end."""
        memory = self.memory.write(pairs[:, :PAIRS])
        for t in range(PAIRS, pairs.shape[1]):  # a cue comes again: its old block goes
            stale = self.memory.read(memory, cues[:, t : t + 1]).handle
            memory = self.memory.append(self.memory.free(memory, stale), pairs[:, t : t + 1])
        return self.memory.read(memory, asked).value


class WithAttention(nn.Module):
    """Everything that came, marked with when it came."""

    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        self.when = nn.Parameter(torch.randn(PAIRS + REVISED, WIDTH) / 4)
        self.norm = nn.RMSNorm(WIDTH, elementwise_affine=False) if normalised else nn.Identity()
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=1, batch_first=True)

    def forward(self, pairs: Tensor, cues: Tensor, asked: Tensor) -> Tensor:
        query, key = self.norm(asked), self.norm(pairs + self.when)
        return self.attention(query, key, pairs, need_weights=False)[0]


class WithoutMemory(nn.Module):
    """A recurrent state, as wide as the blocks that the memory has."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.GRU(WIDTH, PAIRS * WIDTH // 2, batch_first=True)
        self.answer = nn.Linear(PAIRS * WIDTH // 2 + WIDTH, WIDTH)

    def forward(self, pairs: Tensor, cues: Tensor, asked: Tensor) -> Tensor:
        state = self.state(pairs)[0][:, -1:].expand(-1, asked.shape[1], -1)
        return self.answer(torch.cat([state, asked], dim=-1))


class Answers(nn.Module):
    """The same network around each: embed pairs and cues, remember, answer."""

    def __init__(self, remember: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(CUE + VALUE, WIDTH)
        self.remember = remember
        self.answer = nn.Sequential(nn.Linear(2 * WIDTH, 64), nn.ReLU(), nn.Linear(64, VALUE))

    def forward(self, cues: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        pairs = self.embed(torch.cat([cues, values], dim=-1))
        alone, asked = (self.embed(F.pad(some, (0, VALUE))) for some in (cues, asked))
        return self.answer(torch.cat([self.remember(pairs, alone, asked), asked], dim=-1))


def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cues and values as they come, the cues asked (those that came twice first), and answers."""
    cues = torch.randn(batch, PAIRS, CUE, generator=generator)
    values = torch.randn(batch, PAIRS + REVISED, VALUE, generator=generator)
    stream = torch.cat([cues, cues[:, :REVISED]], dim=1)
    return stream, values, cues, torch.cat([values[:, PAIRS:], values[:, REVISED:PAIRS]], dim=1)


def train(remember: Callable[[], nn.Module], steps: int, seed: int = 0) -> tuple[float, float]:
    """The mean squared error on new episodes: of cues that came twice, and once."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Answers(remember())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        cues, values, asked, answers = draw(64, generator)
        loss = F.mse_loss(model(cues, values, asked), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        cues, values, asked, answers = draw(512, generator)
        error = (model(cues, values, asked) - answers).square().mean(dim=(0, 2))
    return error[:REVISED].mean().item(), error[REVISED:].mean().item()


def main(steps: int = 300, seed: int = 0) -> dict[str, tuple[float, float]]:
    kinds = {
        "BlockMemory": WithMemory,
        "plain attention": WithAttention,
        "normalised attention": lambda: WithAttention(normalised=True),
        "no memory (GRU)": WithoutMemory,
    }
    print(f"mean squared error after {steps} steps (1 is a guess): revised, not revised")
    errors = {}
    for name, kind in kinds.items():
        errors[name] = train(kind, steps, seed)
        print(f"{name:20} {errors[name][0]:8.3f} {errors[name][1]:8.3f}")
    return errors


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
