"""Verification methods for draft tokens, one per file; `by_request` applies the one that each request chose."""
