"""The systems that Kanerva++ is compared with (Table 1)."""
