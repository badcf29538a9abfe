"""Our own Triton kernels for GPUs. Importing a module here imports triton, which comes with torch for CUDA.

With TRITON_INTERPRET=1, set before the import, they run on a CPU: slow, and in float32 and float16 only.
"""
