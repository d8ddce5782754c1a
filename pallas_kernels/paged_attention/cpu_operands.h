// What handlers that work on pages need to know of their operands.
#ifndef PALLAS_KERNELS_PAGED_ATTENTION_CPU_OPERANDS_H_
#define PALLAS_KERNELS_PAGED_ATTENTION_CPU_OPERANDS_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "pallas_kernels/paged_attention/cpu_problem.h"
#include "xla/ffi/api/ffi.h"

namespace pk {
namespace paged_attention {

// Returns whether a dtype is one of a cache's.
inline bool ReadType(::xla::ffi::DataType dtype, Type& type) {
  switch (dtype) {
    case ::xla::ffi::F32:
      type = Type::kFloat32;
      return true;
    case ::xla::ffi::BF16:
      type = Type::kBfloat16;
      return true;
    case ::xla::ffi::F16:
      type = Type::kFloat16;
      return true;
    case ::xla::ffi::S8:
      type = Type::kInt8;
      return true;
    case ::xla::ffi::U8:
      type = Type::kFloat8;
      return true;
    default:
      return false;
  }
}

inline bool HasShape(::xla::ffi::AnyBuffer::Dimensions dims, std::initializer_list<int64_t> shape) {
  return std::equal(dims.begin(), dims.end(), shape.begin(), shape.end());
}

}  // namespace paged_attention
}  // namespace pk

#endif  // PALLAS_KERNELS_PAGED_ATTENTION_CPU_OPERANDS_H_
