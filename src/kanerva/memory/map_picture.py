"""A memory's map as a picture."""

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor


def map_picture(maps: Float[Tensor, "B Cm Hm Wm"], scale: int = 4) -> Image.Image:
    """Maps side by side, each scaled to its own range. Three channels become colours; more than
    eight are reduced to their three principal components; others are shown side by side."""
    maps = maps.detach().float().cpu()
    if maps.shape[1] > 8:
        maps = torch.stack([principal_components(one) for one in maps])
    low, high = maps.amin(dim=(1, 2, 3), keepdim=True), maps.amax(dim=(1, 2, 3), keepdim=True)
    levels = ((maps - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    if levels.shape[1] == 3:
        picture = Image.fromarray(torch.cat(list(levels), dim=2).permute(1, 2, 0).numpy())
    else:
        picture = Image.fromarray(torch.cat(list(levels.flatten(0, 1)), dim=1).numpy())
    size = (picture.width * scale, picture.height * scale)
    return picture.resize(size, Image.Resampling.NEAREST)


def principal_components(map: Float[Tensor, "Cm Hm Wm"]) -> Float[Tensor, "3 Hm Wm"]:
    """Project the pixels of a map with many channels onto their three principal components."""
    pixels = map.flatten(1).T  # (Hm Wm, Cm)
    left, size, _ = torch.linalg.svd(pixels - pixels.mean(dim=0), full_matrices=False)
    scores = torch.nn.functional.pad(left * size, (0, max(0, 3 - len(size))))[:, :3]
    return scores.T.unflatten(1, map.shape[1:])
