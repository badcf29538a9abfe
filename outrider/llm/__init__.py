"""Offline batch generation: `LLM` starts a cluster as child processes and generates with it. Does not import torch.

    from outrider import LLM, SamplingParams

    with LLM(model="smollm2-135m-instruct") as llm:
        for output in llm.generate(["Once upon a time", "def is_prime(n):"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

Names are those of vLLM (github.com/vllm-project/vllm, `vllm.LLM`) if the meaning is the same.
"""
