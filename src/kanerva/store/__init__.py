"""Thousands to millions of images in one file, found from a damaged part, erased on request."""
