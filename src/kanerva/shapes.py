"""The letters of every shape in this package.

B episodes · T samples of an episode · K reads · C H W image · Cm Hm Wm memory · h w block
D embedding · Hq Wq a quarter of the image's side · L readout · N images of a data set
S steps of an iterative read

Batch is first and episode second everywhere. `*B` in a signature means one episode or a batch of
them. The aliases cost nothing at run time; the test suite turns them into checks.
"""

from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

Episode = Float[Tensor, "B T C H W"]  # pixels on [0, 1]
Embedding = Float[Tensor, "B T D"]  # E = f_enc(X)
MemoryMap = Float[Tensor, "B Cm Hm Wm"]  # M = f_mem(E)
FeatureMaps = Float[Tensor, "B T D Hq Wq"]  # `kpp`'s embedding of a sample: quarter-size maps
KinMaps = Float[Tensor, "B T _ Hq Wq"]  # what a memory says about an image not in it
Keys = Float[Tensor, "B T K 3"]  # Y: a point in the prior's space, N(0, 1) a priori
Points = Float[Tensor, "B T 2"]  # `kpp`: a place (x, y), as a key or squashed to [-1, 1]
Cells = Int[Tensor, "B T"]  # `kpp`: which cell of the grid
Blocks = Float[Tensor, "B T Cm h w"]  # one block for each sample
Windows = Float[Tensor, "B T K 3"]  # a key squashed to (scale, x, y) on [-1, 1]
WindowPart = Float[Tensor, "B T K"]
Traces = Float[Tensor, "B T K Cm h w"]  # M-hat
Weights = Float[Tensor, "B T K block size"]  # bilinear weights of one axis
Readout = Float[Tensor, "B T L"]  # Z
DecoderOutput = Float[Tensor, "B T P H W"]  # P parameters of the likelihood for each pixel
PerImage = Float[Tensor, "*B T"]  # nats per image
PerPixel = Float[Tensor, "B T H W"]

Pixels = UInt8[Tensor, "N C H W"]  # a data set as stored
Labels = Int[Tensor, "N"]
Counted = Bool[Tensor, "B T"]  # False for images that only pad the last episode
