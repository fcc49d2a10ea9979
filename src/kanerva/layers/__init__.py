"""Small layers the networks are made of; one idea per file."""
