"""Proposers, one file each; `base` is the interface, `factory` makes one by name."""
