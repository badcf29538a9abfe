"""Trains drafter heads on what their target says: `outrider train-head`."""
