"""Where weights, tokenizer and identity of a model come from.

Importing the package, its config, checkpoint_text, fingerprint and default_model
reaches no torch; `outrider.model_hub.open` does, and `outrider.model_hub.load` transformers too.
"""
