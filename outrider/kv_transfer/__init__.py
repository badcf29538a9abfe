"""Moves KV from prefill to decode nodes: `base` has the interface, `receiver` and `connect` the two ends."""
