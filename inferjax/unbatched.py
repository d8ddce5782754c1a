"""The predicates that keep branches real under `vmap`, as the kernels define them."""

from pallas_kernels.unbatched import any_row, max_row, min_row

__all__ = ["any_row", "max_row", "min_row"]
