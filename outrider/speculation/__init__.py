"""Guessing tokens ahead of the target model, and deciding which guesses to verify.

Never imports grpc or stubs. Torch is needed in `verify` and `proposers.model_forward` only.
"""
