"""Fashion-MNIST: 70,000 grey pictures of clothes (Xiao et al. 2017)."""

from functools import partial

from kanerva.data.download import published
from kanerva.data.idx import has_test_images, load_idx_set

load = partial(load_idx_set, "fashion_mnist")
is_present = has_test_images
FILES = published(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    {
        "train-images-idx3-ubyte.gz": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
        "train-labels-idx1-ubyte.gz": ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
        "t10k-images-idx3-ubyte.gz": ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
        "t10k-labels-idx1-ubyte.gz": ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
    },
)
