"""Triton kernels, installed as ``tide_strategies.kernels``.

Importing the package imports neither Triton nor torch: ``compile`` does so when a kernel is wanted.
"""
