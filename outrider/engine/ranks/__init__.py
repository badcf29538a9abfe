"""Tensor parallelism: rank 0 is the node; the other ranks are processes that run the same steps on their shards."""
