"""Evaluation: the bound, its controls, and the record of how each number was made."""
