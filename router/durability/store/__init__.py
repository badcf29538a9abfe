"""The store of requests with a resume window. Read base.py first."""
