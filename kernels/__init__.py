"""Triton kernels, installed as ``tide_strategies.kernels``."""
