"""The table of pixel contexts: causal, a distribution, and as good as what it counts."""

import math

import torch

from kanerva.lab.experiments.lossless import ContextTable, context_offsets, number_contexts


def test_contexts_are_the_nearest_pixels_before():
    offsets = context_offsets(4)
    assert set(offsets) == {(0, -1), (-1, 0), (-1, -1), (-1, 1)}
    assert all(o < (0, 0) for o in context_offsets(18)) and len(set(context_offsets(18))) == 18


def test_a_context_changes_with_pixels_before_and_with_no_others():
    images = (torch.rand(3, 6, 6) < 0.5).float()
    before = number_contexts(images, 8)
    changed = images.clone()
    changed[:, 3, 3] = 1 - changed[:, 3, 3]
    moved = (number_contexts(changed, 8) != before).any(dim=0).nonzero().tolist()
    assert moved and all((i, j) > (3, 3) for i, j in moved)


def test_bits_are_those_of_what_was_counted():
    table, images = ContextTable(4), torch.zeros(50, 6, 6)
    images[:, :, ::2] = 1  # every context has one answer
    blank = table.bits(images)
    assert blank == 36.0  # nothing counted: a bit a pixel
    table.count(images)
    assert table.bits(images) < 1
    noise = (torch.rand(400, 6, 6) < 0.25).float()
    table = ContextTable(4)
    table.count(noise)
    entropy = 36 * -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    assert abs(table.bits(noise) - entropy) < 0.03 * entropy
