"""Moves KV from prefill to decode nodes.

`base` has the values that both ends share, `receiver` the receiving end, `connectors` and `sender` the sending end.
"""
