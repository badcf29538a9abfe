"""Drafts for steps: the client of draft nodes, its bookkeeping, and the gathering of drafts before each step."""
