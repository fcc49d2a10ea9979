"""The DNC's memory access: simplex, allocation, links, gradients, and the paper's loops by hand."""

import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kanerva.models.rivals.dnc_access import (
    AccessState,
    Interface,
    allocation_weights,
    content_weights,
    directions,
    erase_and_add,
    interface_sizes,
    next_links,
    next_precedence,
    next_read_weights,
    next_usage,
    next_write_weights,
    oneplus,
    parse_interface,
    read,
    retention,
    step,
)

B, N, W, R = 2, 5, 3, 2
DOUBLE = torch.float64


def weighting(*shape: int) -> Tensor:
    """Points inside the simplex, with a sum below one."""
    return torch.rand(*shape[:-1], 1, dtype=DOUBLE) * torch.rand(*shape, dtype=DOUBLE).softmax(-1)


def asked(batch: int = B, width: int = W, heads: int = R, spread: float = 2.0) -> Interface:
    size = sum(interface_sizes(width, heads).values())
    vector = spread * torch.randn(batch, size, dtype=DOUBLE)
    return parse_interface(vector, width, heads)


def run(steps: int, slots: int = N) -> list[AccessState]:
    states = [AccessState.zeros(B, slots, W, R, dtype=DOUBLE)]
    for _ in range(steps):
        states.append(step(states[-1], asked()))
    return states


def assert_simplex(weights: Tensor) -> None:
    assert (weights >= 0).all() and (weights.sum(-1) <= 1 + 1e-9).all()


# The interface


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_interface_vector_has_the_papers_size_and_ranges(heads: int):
    sizes = interface_sizes(W, heads)
    assert sum(sizes.values()) == W * heads + 3 * W + 5 * heads + 3
    given = asked(heads=heads, spread=5.0)
    assert [f.name for f in fields(given)] == list(sizes)
    for strength in (given.read_strengths, given.write_strength):
        assert (strength >= 1).all()
    for gate in (given.erase, given.free_gates, given.allocation_gate, given.write_gate):
        assert (gate > 0).all() and (gate < 1).all()
    torch.testing.assert_close(given.read_modes.sum(-1), torch.ones(B, heads, dtype=DOUBLE))
    assert oneplus(torch.zeros(())).item() == pytest.approx(1 + math.log(2))


def test_every_number_of_the_interface_vector_is_used_once():
    vector = torch.randn(1, sum(interface_sizes(W, R).values()), dtype=DOUBLE, requires_grad=True)
    given = parse_interface(vector, W, R)
    sum((getattr(given, f.name) ** 2).sum() for f in fields(given)).backward()
    assert vector.grad is not None and (vector.grad != 0).all()
    assert given.read_keys.shape == (1, R, W) and given.read_modes.shape == (1, R, 3)


# Content


def test_content_is_the_softmax_of_cosines():
    memory, keys = torch.randn(B, N, W, dtype=DOUBLE), torch.randn(B, R, W, dtype=DOUBLE)
    strengths = 1 + 5 * torch.rand(B, R, dtype=DOUBLE)
    cosines = nn.functional.cosine_similarity(keys[:, :, None], memory[:, None], dim=-1)
    expected = (strengths[..., None] * cosines).softmax(-1)
    found = content_weights(memory, keys, strengths)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert_simplex(found)


def test_strength_goes_from_everywhere_to_the_best_slot():
    memory, keys = torch.randn(B, N, W, dtype=DOUBLE), torch.randn(B, R, W, dtype=DOUBLE)
    none, much = (content_weights(memory, keys, torch.full((B, R), s).double()) for s in (0, 1e5))
    torch.testing.assert_close(none, torch.full_like(none, 1 / N))
    cosines = nn.functional.cosine_similarity(keys[:, :, None], memory[:, None], dim=-1)
    best = nn.functional.one_hot(cosines.argmax(-1), N).double()
    torch.testing.assert_close(much, best, atol=1e-6, rtol=0)


def test_content_knows_directions_and_not_lengths():
    memory, keys = torch.randn(B, N, W, dtype=DOUBLE), torch.randn(B, R, W, dtype=DOUBLE)
    strengths = torch.full((B, R), 4.0, dtype=DOUBLE)
    found, longer = (content_weights(memory * s, keys, strengths) for s in (1, 9))
    torch.testing.assert_close(found, longer, rtol=1e-4, atol=1e-5)


def test_blank_slots_are_alike_and_harmless():
    memory = torch.zeros(B, N, W, requires_grad=True)
    found = content_weights(memory, torch.randn(B, R, W), torch.full((B, R), 9.0))
    torch.testing.assert_close(found, torch.full_like(found, 1 / N))
    found.square().sum().backward()
    assert memory.grad is not None and memory.grad.isfinite().all()


# Usage and allocation


def by_sorting(usage: Tensor) -> Tensor:
    """The paper's words: sort, walk up the free list, multiply."""
    found = torch.zeros_like(usage)
    for b, row in enumerate(usage):
        product = 1.0
        for slot in row.argsort(stable=True).tolist():
            found[b, slot] = (1 - row[slot]) * product
            product = product * row[slot]
    return found


def test_allocation_is_the_walk_up_the_free_list():
    usage = torch.rand(20, 7, dtype=DOUBLE)
    usage[3] = usage[3].round()  # ties
    usage[4], usage[5] = 0, 1
    found = allocation_weights(usage)
    torch.testing.assert_close(found, by_sorting(usage), rtol=1e-4, atol=1e-5)
    assert_simplex(found)
    torch.testing.assert_close(found.sum(-1), 1 - usage.prod(-1), rtol=1e-4, atol=1e-5)


def test_allocation_goes_to_the_least_used_slot():
    usage = torch.tensor([[0.9, 0.2, 1.0, 0.0, 0.8], [1.0, 1.0, 1.0, 1.0, 1.0]])
    first, full = allocation_weights(usage)
    torch.testing.assert_close(first, torch.tensor([0, 0, 0, 1.0, 0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(full, torch.zeros(5), atol=1e-5, rtol=0)  # nowhere to write


def sure(**given: object) -> Interface:
    """One head, gates fully open or shut: allocate, write, free nothing, unless said otherwise."""
    plain: dict[str, object] = {
        "read_keys": torch.zeros(1, 1, W),
        "read_strengths": torch.ones(1, 1),
        "read_modes": torch.tensor([[[0.0, 1.0, 0.0]]]),
        "write_key": torch.zeros(1, W),
        "write_strength": torch.ones(1),
        "erase": torch.ones(1, W),
        "add": torch.ones(1, W),
        "free_gates": torch.zeros(1, 1),
        "allocation_gate": torch.ones(1),
        "write_gate": torch.ones(1),
    }
    return Interface(**{**plain, **given})  # pyright: ignore


def slots_of(state: AccessState, codes: Tensor) -> list[int]:
    """Which slot holds each code; every one must be held."""
    apart = torch.cdist(codes[:, 0], state.memory[0])
    assert (apart.amin(-1) < 1e-3).all()
    return apart.argmin(-1).tolist()


def test_each_code_gets_a_slot_of_its_own_and_a_freed_slot_is_used_again():
    codes = nn.functional.normalize(torch.randn(6, 1, W), dim=-1)
    state = AccessState.zeros(1, 4, W, 1)
    for t in range(4):
        state = step(state, sure(add=codes[t]))
    held = slots_of(state, codes[:4])
    assert sorted(held) == [0, 1, 2, 3]
    # full: a write finds no place
    unchanged = step(state, sure(add=codes[4]))
    torch.testing.assert_close(unchanged.memory, state.memory, atol=1e-4, rtol=0)
    # read the third code, free its slot, write: there
    look = sure(
        read_keys=codes[2][None], read_strengths=torch.full((1, 1), 1e4), write_gate=torch.zeros(1)
    )
    state = step(step(state, look), sure(add=codes[5], free_gates=torch.ones(1, 1)))
    assert slots_of(state, codes[[0, 1, 5, 3]]) == held


def test_what_is_freed_is_what_was_read():
    weights = torch.tensor([[[0.0, 1.0, 0.5], [0.0, 0.0, 1.0]]])
    kept = retention(torch.tensor([[1.0, 0.5]]), weights)
    torch.testing.assert_close(kept, torch.tensor([[1.0, 0.0, 0.25]]))
    usage = next_usage(torch.full((1, 3), 0.5), torch.tensor([[0.0, 0.5, 1.0]]), kept)
    torch.testing.assert_close(usage, torch.tensor([[0.5, 0.0, 0.25]]))


# Write, link, read


def test_a_sure_write_replaces_one_slot_and_leaves_the_others():
    memory, add = torch.randn(B, N, W), torch.randn(B, W)
    weights = nn.functional.one_hot(torch.tensor([1, 3]), N).float()
    found = erase_and_add(memory, weights, torch.ones(B, W), add)
    expected = memory.clone()
    expected[0, 1], expected[1, 3] = add[0], add[1]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(erase_and_add(memory, 0 * weights, torch.ones(B, W), add), memory)


def test_write_gates_choose_between_allocation_content_and_nothing():
    free, like = weighting(1, N), weighting(1, N)
    one, none = torch.ones(1, dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE)
    assert torch.equal(next_write_weights(free, like, one, one), free)
    assert torch.equal(next_write_weights(free, like, none, one), like)
    assert not next_write_weights(free, like, one, none).any()


def test_links_lead_from_each_slot_to_the_next_one_written():
    order = [2, 0, 4, 1]
    links, precedence = torch.zeros(1, N, N), torch.zeros(1, N)
    for slot in order:
        weights = nn.functional.one_hot(torch.tensor([slot]), N).float()
        links = next_links(links, precedence, weights)
        precedence = next_precedence(precedence, weights)
    expected = torch.zeros(1, N, N)
    for earlier, later in zip(order[:-1], order[1:], strict=True):
        expected[0, later, earlier] = 1
    assert torch.equal(links, expected)
    assert torch.equal(precedence, nn.functional.one_hot(torch.tensor([1]), N).float())
    backward, forward = directions(links, torch.eye(N)[None, :1])  # a head at slot 0
    assert forward.argmax().item() == 4 and backward.argmax().item() == 2
    again = next_links(links, precedence, torch.eye(N)[None, 0])  # written over: old links go
    assert again[0, 4, 0] == 0 and again[0, 0, 2] == 0 and again[0, 0, 1] == 1


def test_every_weighting_stays_in_the_simplex_for_many_steps():
    for state in run(40):
        for weights in (state.write_weights, state.read_weights, state.precedence):
            assert_simplex(weights)
        for side in (state.links, state.links.mT):  # rows, and columns
            assert_simplex(side)
        assert not state.links.diagonal(dim1=1, dim2=2).any()
        assert (state.usage >= 0).all() and (state.usage <= 1).all()


def test_modes_choose_between_back_here_and_on():
    backward, content, forward = (weighting(B, R, N) for _ in range(3))
    for mode, expected in enumerate((backward, content, forward)):
        modes = torch.zeros(B, R, 3, dtype=DOUBLE)
        modes[..., mode] = 1
        assert torch.equal(next_read_weights(backward, content, forward, modes), expected)


def by_hand(state: AccessState, given: Interface, b: int) -> dict[str, Tensor]:
    """One step of one episode as the paper prints it: indices and loops."""
    memory, links, before = state.memory[b].clone(), torch.zeros(N, N, dtype=DOUBLE), state
    usage = torch.zeros(N, dtype=DOUBLE)
    for i in range(N):
        kept = math.prod(
            1 - given.free_gates[b, r].item() * before.read_weights[b, r, i].item()
            for r in range(R)
        )
        u, w = before.usage[b, i], before.write_weights[b, i]
        usage[i] = (u + w - u * w) * kept
    allocation = by_sorting(usage[None])[0]

    def content(rows: Tensor, key: Tensor, strength: Tensor) -> Tensor:
        cosine = torch.stack(
            [row @ key / (row.norm() * key.norm()).clamp(min=1e-9) for row in rows]
        )
        return (strength * cosine).exp() / (strength * cosine).exp().sum()

    like = content(memory, given.write_key[b], given.write_strength[b])
    gate, new = given.allocation_gate[b], given.write_gate[b]
    weights = new * (gate * allocation + (1 - gate) * like)
    for i in range(N):
        memory[i] = memory[i] * (1 - weights[i] * given.erase[b]) + weights[i] * given.add[b]
        for j in range(N):
            if i != j:
                old = (1 - weights[i] - weights[j]) * before.links[b, i, j]
                links[i, j] = old + weights[i] * before.precedence[b, j]
    reads = []
    for r in range(R):
        last, modes = before.read_weights[b, r], given.read_modes[b, r]
        here = content(memory, given.read_keys[b, r], given.read_strengths[b, r])
        reads.append(modes[0] * (links.T @ last) + modes[1] * here + modes[2] * (links @ last))
    precedence = (1 - weights.sum()) * before.precedence[b] + weights
    return {
        "memory": memory,
        "links": links,
        "precedence": precedence,
        "usage": usage,
        "write_weights": weights,
        "read_weights": torch.stack(reads),
    }


def test_a_step_is_the_papers_written_out_in_loops():
    state = run(4)[-1]
    for _ in range(3):
        given = asked()
        after = step(state, given)
        for b in range(B):
            for name, value in by_hand(state, given, b).items():
                torch.testing.assert_close(getattr(after, name)[b], value, rtol=1e-4, atol=1e-5)
            reads = torch.stack([w @ after.memory[b] for w in after.read_weights[b]])
            torch.testing.assert_close(after.reads[b], reads)
        state = after


# Gradients

PIECES = {
    "content": lambda: (
        content_weights,
        [torch.randn(B, N, W), torch.randn(B, R, W), 1 + torch.rand(B, R)],
    ),
    "retention": lambda: (retention, [torch.rand(B, R), weighting(B, R, N)]),
    "usage": lambda: (next_usage, [torch.rand(B, N), weighting(B, N), torch.rand(B, N)]),
    "allocation": lambda: (allocation_weights, [0.05 + 0.9 * torch.rand(B, N)]),
    "write": lambda: (
        next_write_weights,
        [weighting(B, N), weighting(B, N), torch.rand(B), torch.rand(B)],
    ),
    "erase": lambda: (
        erase_and_add,
        [torch.randn(B, N, W), weighting(B, N), torch.rand(B, W), torch.randn(B, W)],
    ),
    "links": lambda: (next_links, [torch.rand(B, N, N), weighting(B, N), weighting(B, N)]),
    "precedence": lambda: (next_precedence, [weighting(B, N), weighting(B, N)]),
    "directions": lambda: (directions, [torch.rand(B, N, N), weighting(B, R, N)]),
    "read": lambda: (
        read,
        [torch.randn(B, N, W), torch.rand(B, N, N), weighting(B, R, N)]
        + [torch.randn(B, R, W), 1 + torch.rand(B, R), torch.rand(B, R, 3).softmax(-1)],
    ),
}


@pytest.mark.parametrize("piece", PIECES)
def test_each_gradient_is_the_numeric_one(piece: str):
    function, inputs = PIECES[piece]()
    inputs = [value.to(DOUBLE).requires_grad_() for value in inputs]
    assert torch.autograd.gradcheck(function, inputs)


def test_the_gradient_through_several_steps_is_the_numeric_one():
    size = sum(interface_sizes(W, R).values())

    def reads(vectors: Tensor) -> Tensor:
        state = AccessState.zeros(1, N, W, R, dtype=DOUBLE)
        for vector in vectors:
            state = step(state, parse_interface(vector[None], W, R))
        return state.reads

    # one number in every three, to save time; usage differs between slots after the first step
    vectors = torch.randn(3, size, dtype=DOUBLE)
    assert torch.autograd.gradcheck(reads, vectors.requires_grad_(), fast_mode=True)


def test_equal_usages_have_a_finite_gradient():
    usage = torch.zeros(1, N, requires_grad=True)
    allocation_weights(usage)[0, 0].backward()
    assert usage.grad is not None and usage.grad.isfinite().all()


# A computer small enough to watch


class Copier(nn.Module):
    """A feed-forward controller of some 800 weights: what it knows of earlier steps, it read."""

    def __init__(self, bits: int, slots: int = 6, width: int = 6, hidden: int = 16) -> None:
        super().__init__()
        self.slots, self.width = slots, width
        self.hidden = nn.Linear(bits + 1 + width, hidden)
        self.ask = nn.Linear(hidden, sum(interface_sizes(width, 1).values()))
        self.say = nn.Linear(hidden + width, bits)

    def forward(self, inputs: Tensor) -> Tensor:
        state, said = AccessState.zeros(len(inputs), self.slots, self.width, 1), []
        for seen in inputs.unbind(1):
            hidden = self.hidden(torch.cat([seen, state.reads.flatten(1)], dim=-1)).tanh()
            state = step(state, parse_interface(self.ask(hidden), self.width, 1))
            said.append(self.say(torch.cat([hidden, state.reads.flatten(1)], dim=-1)))
        return torch.stack(said, dim=1)


def copying(batch: int, length: int, bits: int) -> tuple[Tensor, Tensor]:
    """Rows of bits, then as many blank rows with a flag: say the bits again, in their order."""
    rows = torch.bernoulli(torch.full((batch, length, bits), 0.5))
    inputs = torch.zeros(batch, 2 * length, bits + 1)
    inputs[:, :length, :bits], inputs[:, length:, bits] = rows, 1
    return inputs, rows


def test_a_tiny_computer_learns_to_copy():
    torch.manual_seed(2)
    length, bits = 3, 4
    model = Copier(bits)
    assert sum(p.numel() for p in model.parameters()) < 1000
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(190):
        inputs, rows = copying(32, length, bits)
        logits = model(inputs)[:, length:]
        optimiser.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, rows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    with torch.no_grad():
        inputs, rows = copying(1000, length, bits)
        right = (model(inputs)[:, length:] > 0) == (rows > 0)
    assert right.float().mean() > 0.99


def test_no_step_looks_at_values():
    """Tensors without values go forward and back: nothing waits for a device, or branches."""
    with FakeTensorMode():
        vectors = torch.randn(3, B, sum(interface_sizes(W, R).values()), requires_grad=True)
        state = AccessState.zeros(B, N, W, R)
        for vector in vectors:
            state = step(state, parse_interface(vector, W, R))
        state.reads.sum().backward()
    assert vectors.grad is not None and vectors.grad.shape == vectors.shape
