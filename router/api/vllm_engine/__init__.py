"""`vllm.grpc.engine.VllmEngine`: the protocol by which an OpenAI gateway asks an engine. `servicer.py` comes first."""
