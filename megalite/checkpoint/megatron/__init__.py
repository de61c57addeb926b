"""Weights of Megatron-LM checkpoints, read without running what a pickle asks for."""
