"""Thousands to millions of images in one file, found from a damaged piece, forgotten on request."""
