"""The learning rate is a closed form of progress."""

import pytest

from kanerva.training.schedule import lr_factor, warmup_steps


def test_it_rises_to_one_and_falls_to_zero():
    factors = [lr_factor(s, total=100, warmup=10) for s in range(101)]
    assert factors[:11] == sorted(factors[:11]) and factors[10] == 1
    assert factors[10:] == sorted(factors[10:], reverse=True) and factors[100] == 0
    assert lr_factor(55, 100, 10) == pytest.approx(0.5)  # half way down the cosine


def test_the_first_step_already_learns():
    assert lr_factor(0, 100, 10) == pytest.approx(1 / 11)
    assert lr_factor(0, 100, 0) == 1


def test_warmup_is_ten_epochs_but_at_most_a_tenth():
    assert warmup_steps(10.0, steps_per_epoch=5, total=10_000) == 50
    assert warmup_steps(10.0, steps_per_epoch=500, total=10_000) == 1000
    assert warmup_steps(0.0, 500, 10_000) == 0


def test_beyond_the_end_it_stays_at_zero():
    assert lr_factor(150, 100, 10) == 0
