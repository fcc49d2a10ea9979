"""Integer networks: the forms that a GPU trains with compute what the plain ones do."""

import torch
import torch.nn.functional as F

from kanerva.memory.fixed_point import multiply_each
from kanerva.memory.pixel_code import around


def test_matrix_by_matrix_gives_the_same_product_and_gradients():
    x = torch.randint(0, 256, (5, 7, 6)).double().requires_grad_()
    weight = torch.randint(-127, 128, (4, 6)).double().requires_grad_()
    target = torch.randn(5, 7, 4, dtype=torch.double)
    each = multiply_each(x, weight)
    assert torch.equal(each, x @ weight.mT)
    gradients = torch.autograd.grad((each * target).sum(), (x, weight))
    expected = torch.autograd.grad(((x @ weight.mT) * target).sum(), (x, weight))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_neighbourhoods_are_those_of_unfold():
    x = torch.randn(3, 2, 5, 4, dtype=torch.double, requires_grad=True)
    found, expected = around(x), F.unfold(x, 3, padding=1)
    assert torch.equal(found, expected)
    target = torch.randn_like(expected)
    gradient = torch.autograd.grad((found * target).sum(), x)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad((expected * target).sum(), x)[0])
