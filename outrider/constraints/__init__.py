"""Constrained output: grammars compiled by llguidance, and the masks of the tokens that they allow."""
