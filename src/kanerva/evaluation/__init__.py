"""How a number is earned: the bound, its controls, and the record that says how it was made."""
