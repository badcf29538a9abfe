"""Moves KV from prefill nodes (senders, see `connectors`) to decode nodes (see `receiver`). Both ends share `base`."""
