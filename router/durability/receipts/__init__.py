"""Receipts of answers, for `outrider replay`. Read base.py first."""
