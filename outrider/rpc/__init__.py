"""The part of RPC that both ends share: channels, credentials, errors as statuses. No server, logs or metrics."""
