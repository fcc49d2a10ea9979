"""The former place of `info`: goes once `kanerva.lab.card` imports it from `kanerva.data`."""

from kanerva.data.registry import info

__all__ = ["info"]
