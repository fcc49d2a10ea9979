"""Models that ship with the package: a folder each, of weights, config, record and card."""
