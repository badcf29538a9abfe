"""Text to tokens and back: tokenizers, chat templates, constraints, stop strings."""
