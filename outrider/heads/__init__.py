"""Drafter heads: small models whose input is the target's hidden states, in the published forms and layouts."""
