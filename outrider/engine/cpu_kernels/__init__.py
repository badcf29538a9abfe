"""Our own CPU kernels, in C++: compiled once per machine, one library for each instruction path.

Read `source/api.h` and `source/panels.h` first, then `decoder.py`; for the sampler, read `source/sampler_api.h`.
Compiling the kernels does not need torch.
"""
