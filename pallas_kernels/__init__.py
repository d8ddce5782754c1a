"""Kernels for inference, importable alone: per op one folder and a table of implementations."""

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quant_matmul import quant_matmul

__all__ = ["grouped_matmul", "paged_attention", "quant_matmul"]
