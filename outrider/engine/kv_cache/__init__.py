"""The paged KV cache: block accounting (torch-free) and the tensors themselves."""
