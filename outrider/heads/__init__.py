"""Drafter heads: small models fed with the target's hidden states, in the forms and layouts of their publishers."""
