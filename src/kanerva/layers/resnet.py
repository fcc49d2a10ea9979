"""ResNet-18 (He et al. 2016) whose blocks shift feature maps along the episode (§3.3, App. E)."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from kanerva.layers.temporal_shift import temporal_shift

Maps = Float[Tensor, "BT C H W"]


class Conv3x3(nn.Conv2d):
    """A 3x3 convolution with padding.

    Images of 28 or 32 pixels end as 1x1 maps, where only the kernel's centre meets a pixel. There
    a matrix product gives the same numbers with a ninth of the work.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride, padding=1, bias=False)

    def forward(self, input: Maps) -> Float[Tensor, "BT C2 H2 W2"]:
        if input.shape[-2:] != (1, 1):
            return super().forward(input)
        return F.linear(input.flatten(1), self.weight[:, :, 1, 1])[..., None, None]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a skip. The first convolution sees shifted maps; the skip does not.

    Maps are shifted along the episode (`temporal_shift`).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, shift: float) -> None:
        super().__init__()
        self.shift = shift
        self.conv1 = Conv3x3(inputs, outputs, stride)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = Conv3x3(outputs, outputs)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Maps, length: int) -> Float[Tensor, "BT C2 H2 W2"]:
        out = self.conv1(temporal_shift(x, length, self.shift))
        out = self.conv2(self.relu(self.norm1(out)))
        return self.relu(self.norm2(out) + self.skip(x))


class ResNet(nn.Module):
    """Stem 7x7/2 and max-pool, four stages, global average: images (BT, ...) to (BT, D)."""

    def __init__(
        self, channels: int, width: int, blocks: tuple[int, int, int, int], shift: float
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages, inputs = [], width
        for stage, count in enumerate(blocks):
            outputs = width * 2**stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(BasicBlock(inputs, outputs, stride, shift))
                inputs = outputs
        self.blocks = nn.ModuleList(stages)
        self.features = inputs
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(
        self, images: Float[Tensor, "BT channels h w"], length: int
    ) -> Float[Tensor, "BT D"]:
        maps = self.stem(images)
        for block in self.blocks:
            maps = block(maps, length)
        return maps.mean(dim=(2, 3))
