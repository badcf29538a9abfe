"""Finds and loads a model's weights, tokenizer and identity.

Importing the package, its config, checkpoint_text, fingerprint, default_model and open does not import torch.
`outrider.model_hub.load` imports torch and transformers.
"""
