"""`python -m kanerva`."""

from kanerva.cli import entry

entry()
