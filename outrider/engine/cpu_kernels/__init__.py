"""Kernels of our own for a CPU, in C++: compiled once on a machine, one library for each instruction path.

Read `source/api.h` and `source/panels.h` first, then `decoder.py`; for the sampler
`source/sampler_api.h`. Torch is not needed to compile them.
"""
