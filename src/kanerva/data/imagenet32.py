"""ImageNet at 32 x 32 (Chrabaszcz et al. 2017)."""

from functools import partial

from kanerva.data.imagenet import has_test_images, load_imagenet

load = partial(load_imagenet, "imagenet32")
is_present = partial(has_test_images, "imagenet32")
