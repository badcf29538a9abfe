"""Speculation: drafts tokens ahead of the target model and decides which of them are verified.

The package never imports grpc or its stubs. Torch is needed only in `proposers.model_forward` and in heads.
"""
