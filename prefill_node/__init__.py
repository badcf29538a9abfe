"""The prefill node: prompt → KV frames. READ FIRST: prefill_loop.py."""
