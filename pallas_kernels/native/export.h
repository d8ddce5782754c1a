// Marks the few symbols that Python finds in the library; all others are hidden.
#ifndef PALLAS_KERNELS_NATIVE_EXPORT_H_
#define PALLAS_KERNELS_NATIVE_EXPORT_H_

#define PK_EXPORT extern "C" __attribute__((visibility("default")))

// Defines the FFI handler `name`: PK_HANDLER(PkProbe, pk::Probe, ffi::Ffi::Bind()...);
// Include "xla/ffi/api/ffi.h" first.
#define PK_HANDLER(name, implementation, ...)                \
  PK_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame*);         \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, implementation, __VA_ARGS__)

#endif  // PALLAS_KERNELS_NATIVE_EXPORT_H_
