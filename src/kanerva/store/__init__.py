"""A store: thousands to millions of images in one file, which a damaged part of one can find."""
