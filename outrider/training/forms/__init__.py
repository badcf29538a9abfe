"""Heads as they are trained: all chains of a text at once, without a cache."""
