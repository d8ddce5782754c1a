// Reads the arrays of packed weights, one matrix or a stack of them, from the arguments of a handler.
#ifndef PALLAS_KERNELS_QUANT_MATMUL_CPU_ARGUMENTS_H_
#define PALLAS_KERNELS_QUANT_MATMUL_CPU_ARGUMENTS_H_

#include <cstdint>
#include <string>

#include "pallas_kernels/quant_matmul/cpu_product.h"
#include "xla/ffi/api/ffi.h"

namespace pk {
namespace quant_matmul {

inline xla::ffi::Error Refuse(const std::string& why) {
  return xla::ffi::Error::InvalidArgument(why);
}

// Reads the optional arrays of scales and minimums: [blocks, groups, 16], all of one float type;
// stacked ones have an axis of `matrices` in front.
inline xla::ffi::Error ReadScales(xla::ffi::RemainingArgs rest, int64_t matrices, bool is_stacked,
                                  Problem& p) {
  const char** const fields[2] = {&p.scales, &p.minimums};
  if (rest.size() > 2) return Refuse("at most scales and minimums follow the values");
  for (size_t i = 0; i < rest.size(); ++i) {
    const auto array = rest.get<xla::ffi::AnyBuffer>(i);
    if (!array) return array.error();
    const bool is_half = array->element_type() == xla::ffi::F16;
    if (!is_half && array->element_type() != xla::ffi::F32) {
      return Refuse("scales and minimums are float32 or float16");
    }
    const auto shape = array->dimensions();
    const size_t lead = is_stacked ? 1 : 0;
    if (shape.size() != lead + 3 || (is_stacked && shape[0] != matrices) ||
        shape[lead] != p.blocks || shape[lead + 1] < 1 || shape[lead + 2] != 16) {
      return Refuse("scales and minimums are [blocks, groups, 16], behind an axis of matrices");
    }
    const int64_t groups = shape[lead + 1];
    if (i && (groups != p.groups || is_half != p.scales_are_half)) {
      return Refuse("scales and minimums differ in their groups or types");
    }
    p.groups = groups;
    p.scales_are_half = is_half;
    *fields[i] = static_cast<const char*>(array->untyped_data());
  }
  return xla::ffi::Error::Success();
}

// Points a problem, whose sizes are set, to the weights of the first of `matrices`.
inline xla::ffi::Error ReadWeight(xla::ffi::AnyBuffer values, xla::ffi::RemainingArgs rest,
                                  int64_t matrices, bool is_stacked, int64_t format,
                                  int64_t activations, Problem& p) {
  p.values = static_cast<const char*>(values.untyped_data());
  if (const char* why = SetFormat(p, format, activations)) return Refuse(why);
  xla::ffi::Error error = ReadScales(rest, matrices, is_stacked, p);
  if (error.failure()) return error;
  if (const char* why = SetChunks(p)) return Refuse(why);
  if (static_cast<int64_t>(values.size_bytes()) != matrices * p.blocks * p.block_bytes) {
    return Refuse("the packed values have another size than [num_in, num_out] asks for");
  }
  return xla::ffi::Error::Success();
}

// Points a problem to the rows it multiplies.
inline xla::ffi::Error ReadRows(xla::ffi::AnyBuffer x, Problem& p) {
  if (x.element_type() != xla::ffi::F32 && x.element_type() != xla::ffi::BF16) {
    return Refuse("x is float32 or bfloat16");
  }
  p.x = x.untyped_data();
  p.x_is_bfloat16 = x.element_type() == xla::ffi::BF16;
  return xla::ffi::Error::Success();
}

}  // namespace quant_matmul
}  // namespace pk

#endif  // PALLAS_KERNELS_QUANT_MATMUL_CPU_ARGUMENTS_H_
