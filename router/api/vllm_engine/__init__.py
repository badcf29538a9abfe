"""`vllm.grpc.engine.VllmEngine`: the protocol by which an OpenAI gateway calls an engine. Read servicer.py first."""
