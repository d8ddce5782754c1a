// The FFI handler of the product with packed weights: checks, packs x, and shares out the columns.
#include <memory>
#include <string>

#include "pallas_kernels/native/cpu_features.h"
#include "pallas_kernels/native/float_mode.h"
#include "pallas_kernels/native/parallel_for.h"
#include "pallas_kernels/quant_matmul/cpu_product.h"
#include "xla/ffi/api/ffi.h"
// After XLA's header, whose types it names.
#include "pallas_kernels/native/export.h"

namespace ffi = xla::ffi;

namespace pk {
namespace quant_matmul {
namespace {

ffi::Error Refuse(const std::string& why) { return ffi::Error::InvalidArgument(why); }

// Reads the optional arrays of scales and minimums: [blocks, groups, 16], all of one float type.
ffi::Error ReadScales(ffi::RemainingArgs rest, Problem& p) {
  const char** const fields[2] = {&p.scales, &p.minimums};
  if (rest.size() > 2) return Refuse("at most scales and minimums follow the values");
  for (size_t i = 0; i < rest.size(); ++i) {
    const auto array = rest.get<ffi::AnyBuffer>(i);
    if (!array) return array.error();
    const bool is_half = array->element_type() == ffi::F16;
    if (!is_half && array->element_type() != ffi::F32) {
      return Refuse("scales and minimums are float32 or float16");
    }
    const auto shape = array->dimensions();
    if (shape.size() != 3 || shape[0] != p.blocks || shape[2] != 16 || shape[1] < 1) {
      return Refuse("scales and minimums are [blocks, groups, 16]");
    }
    if (i && (shape[1] != p.groups || is_half != p.scales_are_half)) {
      return Refuse("scales and minimums differ in their groups or types");
    }
    p.groups = shape[1];
    p.scales_are_half = is_half;
    *fields[i] = static_cast<const char*>(array->untyped_data());
  }
  return ffi::Error::Success();
}

ffi::Error QuantMatmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer values,
                       ffi::RemainingArgs rest, ffi::ResultBuffer<ffi::F32> y, int64_t format,
                       int64_t activations, int64_t group, int64_t forced_variant,
                       int64_t max_threads) {
  const auto x_shape = x.dimensions(), y_shape = y->dimensions();
  if (x_shape.size() != 2 || y_shape.size() != 2 || x_shape[0] != y_shape[0]) {
    return Refuse("x and y are matrices with equally many rows");
  }
  if (x.element_type() != ffi::F32 && x.element_type() != ffi::BF16) {
    return Refuse("x is float32 or bfloat16");
  }
  Problem p = {};
  p.x = x.untyped_data();
  p.x_is_bfloat16 = x.element_type() == ffi::BF16;
  p.values = static_cast<const char*>(values.untyped_data());
  p.y = y->typed_data();
  p.rows = x_shape[0];
  p.num_in = x_shape[1];
  p.num_out = y_shape[1];
  p.group = group;
  if (const char* why = SetFormat(p, format, activations)) return Refuse(why);
  if (ffi::Error error = ReadScales(rest, p); error.failure()) return error;
  if (const char* why = SetChunks(p)) return Refuse(why);
  if (static_cast<int64_t>(values.size_bytes()) != p.blocks * p.block_bytes) {
    return Refuse("the packed values have another size than [num_in, num_out] asks for");
  }
  const int variant = ChosenVariant(forced_variant);
  if (variant < 0) return Refuse("this processor cannot run that variant");
  Run(pool, p, variant, max_threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace quant_matmul
}  // namespace pk

PK_HANDLER(PkQuantMatmul, pk::quant_matmul::QuantMatmul,
           ffi::Ffi::Bind()
               .Ctx<ffi::ThreadPool>()
               .Arg<ffi::AnyBuffer>()
               .Arg<ffi::AnyBuffer>()
               .RemainingArgs()
               .Ret<ffi::Buffer<ffi::F32>>()
               .Attr<int64_t>("format")
               .Attr<int64_t>("activations")
               .Attr<int64_t>("group")
               .Attr<int64_t>("variant")
               .Attr<int64_t>("max_threads"));
