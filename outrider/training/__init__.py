"""Trains drafter heads on the answers of their target (`outrider train-head`)."""
