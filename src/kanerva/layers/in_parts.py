"""A loss summed over parts of a batch, whose gradients are computed with it.

On a CPU the activations of a whole batch do not fit into the cache, and they are kept until the
backward pass. Here each part goes forward and backward before the next one begins.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def sum_in_parts(
    loss: Callable[..., Float[Tensor, " n"]],
    inputs: Sequence[Float[Tensor, "N ..."]],
    parameters: Sequence[Tensor],
    size: int,
) -> Float[Tensor, ""]:
    """`loss(*inputs).sum()`, `size` rows at a time. Each row's loss may depend on the same row of
    every input and on `parameters`; nothing else that it depends on gets a gradient."""
    total = _SumInParts.apply(loss, size, len(inputs), *inputs, *parameters)
    assert isinstance(total, Tensor)
    return total


class _SumInParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Callable[..., Tensor], size: int, n: int, *given: Tensor) -> Tensor:
        inputs, parameters = given[:n], given[n:]
        total = torch.zeros((), dtype=torch.float64)
        of_rows = [[] for _ in inputs]  # gradients
        of_parameters = [torch.zeros_like(p) for p in parameters]
        for part in zip(*[x.split(size) for x in inputs], strict=True):
            rows = [x.detach().requires_grad_(x.requires_grad) for x in part]
            with torch.enable_grad():
                value = loss(*rows).sum()
            total += value.detach()
            wanted = [i for i, x in enumerate(rows) if x.requires_grad]
            if not wanted and not parameters:
                continue
            grads = torch.autograd.grad(value, [*[rows[i] for i in wanted], *parameters])
            for i, grad in zip(wanted, grads[: len(wanted)], strict=True):
                of_rows[i].append(grad)
            for so_far, grad in zip(of_parameters, grads[len(wanted) :], strict=True):
                so_far += grad
        complete = [torch.cat(grads) if grads else None for grads in of_rows]
        ctx.save_for_backward(*complete, *of_parameters)
        return total.to(inputs[0].device, torch.float32)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, weight: Tensor
    ) -> tuple[Tensor | None, ...]:
        grads = [None if grad is None else weight * grad for grad in ctx.saved_tensors]
        return None, None, None, *grads
