"""The Triton kernels: each module has the functions of the torch module of its name, with the same signatures."""
