"""Guessing tokens ahead of the target model, and deciding which guesses to verify.

Never imports grpc or stubs, and reaches torch only through `proposers.draft_model`.
"""
