"""The latent memory: its map, how it is written, read, searched and saved, and `Memory` itself."""
