"""Finds and loads a model's weights, tokenizer and identity.

Importing the package, or its modules config, checkpoint_text, fingerprint, default_model or open, imports no torch.
`outrider.model_hub.load` imports torch and transformers.
"""
