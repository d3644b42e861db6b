"""Servers that do the wrong thing, as real processes, and what starts them."""
