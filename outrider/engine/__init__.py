"""The engine shared by prefill, decode and draft nodes: batches, paged KV cache, forward pass, sampler. No gRPC."""
