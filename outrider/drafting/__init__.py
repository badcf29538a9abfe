"""Clients of draft nodes: decode nodes, and other engines by `Client`. Torch-free; needs no service around it."""
