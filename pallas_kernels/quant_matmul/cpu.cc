// The FFI handler of the product with packed weights: checks, packs x, and shares out the columns.
#include "pallas_kernels/native/cpu_features.h"
#include "pallas_kernels/quant_matmul/cpu_arguments.h"
#include "pallas_kernels/quant_matmul/cpu_product.h"
#include "xla/ffi/api/ffi.h"
// After XLA's header, whose types it names.
#include "pallas_kernels/native/export.h"

namespace ffi = xla::ffi;

namespace pk {
namespace quant_matmul {
namespace {

ffi::Error QuantMatmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer values,
                       ffi::RemainingArgs rest, ffi::ResultBuffer<ffi::F32> y, int64_t format,
                       int64_t activations, int64_t group, int64_t forced_variant,
                       int64_t max_threads) {
  const auto x_shape = x.dimensions(), y_shape = y->dimensions();
  if (x_shape.size() != 2 || y_shape.size() != 2 || x_shape[0] != y_shape[0]) {
    return Refuse("x and y are matrices with equally many rows");
  }
  Problem p = {};
  if (ffi::Error error = ReadRows(x, p); error.failure()) return error;
  p.y = y->typed_data();
  p.rows = x_shape[0];
  p.num_in = x_shape[1];
  p.num_out = y_shape[1];
  p.group = group;
  ffi::Error error = ReadWeight(values, rest, 1, false, format, activations, p);
  if (error.failure()) return error;
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
