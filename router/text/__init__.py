"""Conversion between text and tokens: tokenizers, chat templates, constraints, stop strings."""
