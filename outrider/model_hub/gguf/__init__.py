"""Reads GGUF checkpoints: configuration, tokenizer and tensors in transformers' terms. Torch-free.

READ FIRST: `directory.gguf_directory` writes a model's text files once, and `directory.open_directory` opens it.
"""
