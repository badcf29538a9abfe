"""Finds and loads a model's weights, tokenizer and identity.

Importing the package, its config, checkpoint_text, fingerprint and default_model does not import torch;
`outrider.model_hub.open` does, and `outrider.model_hub.load` imports transformers too.
"""
