"""Data that outlives a router: the shared store and receipts."""
