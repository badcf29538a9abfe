"""Moves KV from prefill to decode nodes: `base` has the shared values, `receiver` and `connectors` the two ends."""
