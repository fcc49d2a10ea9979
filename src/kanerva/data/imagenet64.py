"""ImageNet at 64 x 64 (Chrabaszcz et al. 2017)."""

from functools import partial

from kanerva.data.imagenet import has_test_images, load_imagenet

load = partial(load_imagenet, "imagenet64")
is_present = partial(has_test_images, "imagenet64")
