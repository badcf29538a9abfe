"""The prefill node, which turns prompts into KV frames. Read prefill_loop.py first."""
