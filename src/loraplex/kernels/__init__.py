"""Triton kernels and their launchers: preallocated tensors in, no policy, no checks."""
