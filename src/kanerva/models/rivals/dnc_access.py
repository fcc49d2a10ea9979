"""Memory access of the differentiable neural computer (Graves et al. 2016, Nature 538, Methods).

    state = AccessState.zeros(batch, slots, width, heads)
    state = step(state, parse_interface(vector, width, heads))  # free, write, link, read
    reads = state.reads                                         # R vectors, for the controller

Letters are the paper's: N slots of W numbers (M), R read heads, usage u, links L, precedence p.
Each function is one equation of the paper, batched over episodes. Every weighting is nonnegative,
with a sum of at most one.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

_EPSILON = 1e-6  # as in DeepMind's code: keeps squared norms, and usage in a logarithm, above zero

Slots = Float[Tensor, "B N W"]  # M
Weighting = Float[Tensor, "B N"]  # over slots: w^w, a, u, p
Weightings = Float[Tensor, "B R N"]  # one for each head: w^r, c, f, b
Links = Float[Tensor, "B N N"]  # L[i, j]: slot i was written after slot j
Gate = Float[Tensor, "B"]
Gates = Float[Tensor, "B R"]
Vector = Float[Tensor, "B W"]
Vectors = Float[Tensor, "B R W"]


# The interface vector (Methods, "Interface parameters")


@dataclass(frozen=True)
class Interface:
    """The parameters of one step of memory access, which a controller outputs."""

    read_keys: Vectors
    read_strengths: Gates
    read_modes: Float[Tensor, "B R 3"]  # backward, content, forward
    write_key: Vector
    write_strength: Gate
    erase: Vector
    add: Vector  # v, the write vector
    free_gates: Gates
    allocation_gate: Gate
    write_gate: Gate


def interface_sizes(width: int, heads: int) -> dict[str, int]:
    """The size of each part of the interface vector, in order; their sum is W R + 3 W + 5 R + 3."""
    return {
        "read_keys": heads * width,
        "read_strengths": heads,
        "read_modes": 3 * heads,
        "write_key": width,
        "write_strength": 1,
        "erase": width,
        "add": width,
        "free_gates": heads,
        "allocation_gate": 1,
        "write_gate": 1,
    }


def parse_interface(vector: Float[Tensor, "B xi"], width: int, heads: int) -> Interface:
    """Split a controller's output, and map each part to its range."""
    sizes = interface_sizes(width, heads)
    part = dict(zip(sizes, vector.split(list(sizes.values()), dim=-1), strict=True))
    return Interface(
        read_keys=part["read_keys"].unflatten(-1, (heads, width)),
        read_strengths=oneplus(part["read_strengths"]),
        read_modes=part["read_modes"].unflatten(-1, (heads, 3)).softmax(-1),
        write_key=part["write_key"],
        write_strength=oneplus(part["write_strength"])[:, 0],
        erase=part["erase"].sigmoid(),
        add=part["add"],
        free_gates=part["free_gates"].sigmoid(),
        allocation_gate=part["allocation_gate"].sigmoid()[:, 0],
        write_gate=part["write_gate"].sigmoid()[:, 0],
    )


def oneplus(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """1 + ln(1 + e^x), which maps to [1, inf), the range of a strength."""
    return 1 + F.softplus(x)


# Content-based addressing


def content_weights(memory: Slots, keys: Vectors, strengths: Gates) -> Weightings:
    """C(M, k, beta): a softmax over slots of beta times the cosine of key and slot."""
    return (strengths[..., None] * (_unit(keys) @ _unit(memory).mT)).softmax(-1)


def _unit(x: Float[Tensor, "*any W"]) -> Float[Tensor, "*any W"]:
    """Normalise vectors. Those shorter than about 1e-3 shrink towards zero: a slot that was hardly
    written to matches nothing, and gradients stay bounded."""
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


# Dynamic memory allocation


def retention(free_gates: Gates, read_weights: Weightings) -> Weighting:
    """psi = prod_i (1 - f^i w^r,i): the share of each slot that the free gates do not free."""
    kept = 1 - free_gates[..., None] * read_weights
    product = kept[:, 0]
    for head in range(1, kept.shape[1]):  # the gradient of torch.prod synchronises the device
        product = product * kept[:, head]
    return product


def next_usage(usage: Weighting, write_weights: Weighting, kept: Weighting) -> Weighting:
    """u = (u + w - u w) psi, from the usage and write weights of the step before."""
    return (usage + write_weights - usage * write_weights) * kept


def allocation_weights(usage: Weighting) -> Weighting:
    """a[phi_j] = (1 - u[phi_j]) prod_{i<j} u[phi_i], where phi sorts slots from least to most used.

    Instead of sorting, a matrix `before` says which slot precedes which; it has no gradient. The
    product over preceding slots is then a matrix product of logarithms, whose gradient needs no
    scatter and no device synchronisation. Of slots with equal usage the first precedes.
    """
    usage = _EPSILON + (1 - _EPSILON) * usage
    mine, other = usage[:, :, None], usage[:, None, :]
    number = torch.arange(usage.shape[1], device=usage.device)
    before = (other < mine) | ((other == mine) & (number < number[:, None]))  # (B, N, N)
    filled = (before.to(usage.dtype) @ usage.log()[..., None])[..., 0].exp()
    return (1 - usage) * filled


def next_write_weights(
    allocation: Weighting, content: Weighting, allocation_gate: Gate, write_gate: Gate
) -> Weighting:
    """w^w = g_w [g_a a + (1 - g_a) c]."""
    allocated, written = allocation_gate[:, None], write_gate[:, None]
    return written * (allocated * allocation + (1 - allocated) * content)


def erase_and_add(memory: Slots, write_weights: Weighting, erase: Vector, add: Vector) -> Slots:
    """M = M (1 - w e^T) + w v^T."""
    weights = write_weights[..., None]
    return memory * (1 - weights * erase[:, None]) + weights * add[:, None]


# Temporal memory linkage


def next_links(links: Links, precedence: Weighting, write_weights: Weighting) -> Links:
    """L[i, j] = (1 - w[i] - w[j]) L[i, j] + w[i] p[j], L[i, i] = 0, with p of the step before."""
    to, source = write_weights[:, :, None], write_weights[:, None, :]
    links = (1 - to - source) * links + to * precedence[:, None, :]
    return links * (1 - torch.eye(links.shape[-1], dtype=links.dtype, device=links.device))


def next_precedence(precedence: Weighting, write_weights: Weighting) -> Weighting:
    """p = (1 - sum w) p + w: the degree to which each slot was the last one written."""
    return (1 - write_weights.sum(-1, keepdim=True)) * precedence + write_weights


def directions(links: Links, read_weights: Weightings) -> tuple[Weightings, Weightings]:
    """b = L^T w^r and f = L w^r: the slots written before, and after, those read last."""
    return read_weights @ links, read_weights @ links.mT


def next_read_weights(
    backward: Weightings, content: Weightings, forward: Weightings, modes: Float[Tensor, "B R 3"]
) -> Weightings:
    """w^r = pi_1 b + pi_2 c + pi_3 f."""
    back, here, on = modes[..., None].unbind(-2)
    return back * backward + here * content + on * forward


def read(
    memory: Slots,
    links: Links,
    read_weights: Weightings,
    keys: Vectors,
    strengths: Gates,
    modes: Float[Tensor, "B R 3"],
) -> Weightings:
    """The next read weights, given the last ones."""
    backward, forward = directions(links, read_weights)
    content = content_weights(memory, keys, strengths)
    return next_read_weights(backward, content, forward, modes)


# One whole step


@dataclass(frozen=True)
class AccessState:
    """The state that is carried from step to step."""

    memory: Slots
    links: Links
    precedence: Weighting
    usage: Weighting
    write_weights: Weighting
    read_weights: Weightings

    @classmethod
    def zeros(cls, batch: int, slots: int, width: int, heads: int, **where: Any) -> "AccessState":
        """The state before any write. `where`: options of torch.zeros, such as the device."""
        shapes = [(slots, width), (slots, slots), (slots,), (slots,), (slots,), (heads, slots)]
        return cls(*[torch.zeros(batch, *shape, **where) for shape in shapes])

    @property
    def reads(self) -> Vectors:
        """r^i = M^T w^r,i."""
        return self.read_weights @ self.memory


def step(state: AccessState, inputs: Interface) -> AccessState:
    """Free slots that were read, allocate, write, link, read: in the paper's order."""
    kept = retention(inputs.free_gates, state.read_weights)
    usage = next_usage(state.usage, state.write_weights, kept)
    query = inputs.write_key[:, None], inputs.write_strength[:, None]
    content, allocation = content_weights(state.memory, *query)[:, 0], allocation_weights(usage)
    weights = next_write_weights(allocation, content, inputs.allocation_gate, inputs.write_gate)
    memory = erase_and_add(state.memory, weights, inputs.erase, inputs.add)
    links = next_links(state.links, state.precedence, weights)
    query = inputs.read_keys, inputs.read_strengths, inputs.read_modes
    read_weights = read(memory, links, state.read_weights, *query)
    precedence = next_precedence(state.precedence, weights)
    return AccessState(memory, links, precedence, usage, weights, read_weights)
