"""Proposers, one per file; `base` has the interface, `factory` makes one by name."""
