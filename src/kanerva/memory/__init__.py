"""The heart: a latent memory map, how it is written, where keys point, and what a user holds."""
