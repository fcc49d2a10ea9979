"""Schemas of requests, with their limits."""

from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field

from kanerva.explore.pixels import Damage, Image, from_text, to_image
from kanerva.explore.session import Session

Text = Annotated[str, Field(max_length=400_000)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Handle = Annotated[int, Field(ge=0, lt=2**53)]
Place = Annotated[float, Field(ge=-1, le=1)]


class Start(BaseModel):
    model: str | None = Field(default=None, max_length=500)


class Write(BaseModel):
    images: list[Text] = Field(max_length=1024)


class Handles(BaseModel):
    handles: list[Handle] = Field(max_length=4096)


class Shrink(BaseModel):
    bits: int = Field(ge=0, le=65535)
    handles: list[Handle] = Field(default=[], max_length=4096)
    again: bool = False  # while a slider moves: replace the last shrink of the same handles


class Cue(BaseModel):
    image: Text
    hidden: Text | None = None
    noise: Literal["none", "salt_pepper", "gaussian"] = "none"
    amount: float = Field(default=0.0, ge=0, le=2)
    down: int = Field(default=0, ge=-6, le=6)
    right: int = Field(default=0, ge=-6, le=6)
    seed: Seed = 0
    mask_given: bool = True

    def parts(self, session: Session) -> tuple[Image, Damage]:
        """The image, and how the user damaged it."""
        config = session.model.config
        height, width = config.image[1:]
        hidden = torch.zeros(height, width, dtype=torch.bool)
        if self.hidden is not None:
            hidden = from_text(self.hidden, (height, width)) > 127
        damage = Damage(hidden, self.noise, self.amount, self.down, self.right, self.seed)
        return to_image(self.image, config.image, config.likelihood == "bernoulli"), damage


class Steps(Cue):
    count: int = Field(default=8, ge=1, le=16)
    sample: bool = False


class Dream(BaseModel):
    x: Place | None = None
    y: Place | None = None
    spread: float = Field(default=0.0, ge=0, le=2)
    count: int = Field(default=1, ge=1, le=24)
    seed: Seed = 0


class Examples(BaseModel):
    set: str = Field(max_length=100)
    count: int = Field(default=12, ge=1, le=64)
    seed: Seed = 0


class Search(Cue):
    page: int = Field(default=0, ge=0, le=20)


class Browse(BaseModel):
    page: int = Field(default=0, ge=0, lt=2**31)


class Screen(BaseModel):
    cue: Cue | None = None
    store: bool = False  # search the store instead of the memory
