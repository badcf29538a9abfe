"""The decode node: KV in, tokens out."""
