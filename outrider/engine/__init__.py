"""The engine that prefill, decode and draft nodes share: batches, paged KV cache, forward pass, sampler. No gRPC."""
