"""Drafts for steps: the client of draft nodes, its bookkeeping, and what is gathered before each step."""
