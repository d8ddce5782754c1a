// The FFI handler of the product of row tiles with packed matrices of a stack.
#include "pallas_kernels/grouped_matmul/cpu_groups.h"
#include "pallas_kernels/native/cpu_features.h"
#include "pallas_kernels/quant_matmul/cpu_arguments.h"
#include "xla/ffi/api/ffi.h"
// After XLA's header, whose types it names.
#include "pallas_kernels/native/export.h"

namespace ffi = xla::ffi;

namespace pk {
namespace grouped_matmul {
namespace {

using quant_matmul::Refuse;

ffi::Error GroupedMatmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> groups,
                         ffi::Buffer<ffi::S32> rows, ffi::AnyBuffer values,
                         ffi::RemainingArgs rest, ffi::ResultBuffer<ffi::F32> y, int64_t format,
                         int64_t activations, int64_t group, int64_t forced_variant,
                         int64_t max_threads) {
  const auto x_shape = x.dimensions(), y_shape = y->dimensions();
  if (x_shape.size() != 3 || y_shape.size() != 3 || x_shape[0] != y_shape[0] ||
      x_shape[1] != y_shape[1]) {
    return Refuse("x and y are equally many tiles of equally many rows");
  }
  Tiles t = {};
  t.num_tiles = x_shape[0];
  t.height = x_shape[1];
  if (static_cast<int64_t>(groups.element_count()) != t.num_tiles ||
      static_cast<int64_t>(rows.element_count()) != t.num_tiles) {
    return Refuse("every tile has a group and a number of rows");
  }
  if (values.dimensions().size() < 3) return Refuse("the packed values are a stack of matrices");
  t.groups = groups.typed_data();
  t.rows = rows.typed_data();
  t.num_matrices = values.dimensions()[0];
  if (t.num_matrices < 1) return Refuse("a stack has at least one matrix");
  Problem& p = t.first;
  if (ffi::Error error = quant_matmul::ReadRows(x, p); error.failure()) return error;
  p.y = y->typed_data();
  p.num_in = x_shape[2];
  p.num_out = y_shape[2];
  p.group = group;
  ffi::Error error =
      quant_matmul::ReadWeight(values, rest, t.num_matrices, true, format, activations, p);
  if (error.failure()) return error;
  const int variant = ChosenVariant(forced_variant);
  if (variant < 0) return Refuse("this processor cannot run that variant");
  Run(pool, t, variant, max_threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace grouped_matmul
}  // namespace pk

PK_HANDLER(PkGroupedMatmul, pk::grouped_matmul::GroupedMatmul,
           ffi::Ffi::Bind()
               .Ctx<ffi::ThreadPool>()
               .Arg<ffi::AnyBuffer>()
               .Arg<ffi::Buffer<ffi::S32>>()
               .Arg<ffi::Buffer<ffi::S32>>()
               .Arg<ffi::AnyBuffer>()
               .RemainingArgs()
               .Ret<ffi::Buffer<ffi::F32>>()
               .Attr<int64_t>("format")
               .Attr<int64_t>("activations")
               .Attr<int64_t>("group")
               .Attr<int64_t>("variant")
               .Attr<int64_t>("max_threads"));
