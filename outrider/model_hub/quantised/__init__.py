"""Reads checkpoints by transformers' parameter names, plain or quantised, tensor by tensor. Torch-free."""
