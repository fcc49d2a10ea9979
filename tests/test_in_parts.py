"""`sum_in_parts` against the same loss of the whole batch."""

import pytest
import torch
from torch import Tensor

from kanerva.layers.in_parts import sum_in_parts


def loss(weight: Tensor, sizes: list[int]):
    def of_rows(x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        return ((x @ weight).tanh() * y).sum(dim=1)

    return of_rows


@pytest.mark.parametrize("size, parts", [(3, [3, 3, 1]), (7, [7]), (100, [7])])
def test_it_is_the_sum_over_the_batch_with_the_same_gradients(size: int, parts: list[int]):
    x, weight = torch.randn(7, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    y, sizes = torch.randn(7, 5), []
    found = sum_in_parts(loss(weight, sizes), [x, y], [weight], size)
    assert sizes == parts
    expected = loss(weight, [])(x, y).sum()
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(0.3 * one, [x, weight]) for one in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_only_what_needs_gradients_gets_them():
    x, weight = torch.randn(5, 4), torch.randn(4, 5)
    y = torch.randn(5, 5, requires_grad=True)
    sum_in_parts(loss(weight, []), [x, y], [], 2).backward()
    assert y.grad is not None and x.grad is None and weight.grad is None
    y = y.detach()
    total = sum_in_parts(loss(weight, []), [x, y], [], 2)
    assert not total.requires_grad
    torch.testing.assert_close(total, loss(weight, [])(x, y).sum())


def test_a_part_is_gone_before_the_next_one_begins():
    """The activations of one part at a time are alive, forward and backward."""
    alive, most = [0], [0]

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            alive[0] -= 1
            return grad

    x = torch.randn(6, 2, requires_grad=True)
    sum_in_parts(lambda rows: Watched.apply(rows).sum(dim=1), [x], [], 2).backward()
    assert most == [1] and alive == [0]


def test_inputs_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        sum_in_parts(lambda a, b: a + b, [torch.zeros(4), torch.zeros(2)], [], 2)
