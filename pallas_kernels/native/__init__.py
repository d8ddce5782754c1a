"""The C++ side of the CPU kernels: how the shared library is built, loaded and registered.

A kernel is two kinds of source. `cpu_kernel*.cc` holds the loops: it is compiled once for every
variant of the instruction set, inside `namespace PK_VARIANT`, and includes nothing but C headers,
intrinsics and our own headers. Every other `.cc` holds FFI handlers: it is compiled once, and picks
a variant when it is called. `build.py` finds both in all folders; nothing has to be listed.
"""

from pallas_kernels.native.library import available, target, unavailable_reason, variants

__all__ = ["available", "target", "unavailable_reason", "variants"]
