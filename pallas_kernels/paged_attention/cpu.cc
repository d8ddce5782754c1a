// The FFI handler of paged attention: checks what it is given.
#include "pallas_kernels/native/cpu_features.h"
#include "pallas_kernels/native/export.h"
#include "pallas_kernels/paged_attention/cpu_operands.h"
#include "pallas_kernels/paged_attention/cpu_run.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pk {
namespace paged_attention {
namespace {

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;
using Factors = ffi::Buffer<ffi::BF16>;

// Fills a problem from the operands; returns what is wrong with them, or null.
const char* Read(ffi::AnyBuffer q, ffi::AnyBuffer pool, Factors factors, Ints layers, Ints table,
                 Ints positions, Ints lengths, Floats sinks, ffi::AnyBuffer out, Problem& p) {
  const auto qd = q.dimensions(), pd = pool.dimensions();
  if (qd.size() != 5 || pd.size() != 6) return "q has 5 axes and the pool 6";
  p.batch = qd[0], p.tokens = qd[1], p.heads = qd[2], p.group = qd[3], p.width = qd[4];
  p.layers_in_pool = pd[0], p.pages = pd[1], p.planes = pd[3], p.page_size = pd[4];
  if (!HasShape(pd, {pd[0], pd[1], p.heads, pd[3], pd[4], p.width})) {
    return "the pool has other heads or another width than q";
  }
  if (p.layers_in_pool < 1 || p.pages < 1 || p.planes < 1 || p.page_size < 1) {
    return "the pool is empty";
  }
  if (table.dimensions().size() != 2) return "the block table has 2 axes";
  p.table_width = table.dimensions()[1];
  if (!HasShape(table.dimensions(), {p.batch, p.table_width}) ||
      !HasShape(layers.dimensions(), {p.batch}) || !HasShape(lengths.dimensions(), {p.batch}) ||
      !HasShape(positions.dimensions(), {p.batch, p.tokens})) {
    return "layers, tables, positions and lengths belong to another batch";
  }
  const int64_t sink_rows = sinks.dimensions().size() == 3 ? sinks.dimensions()[0] : -1;
  if (!HasShape(sinks.dimensions(), {sink_rows, p.heads, p.group}) ||
      (sink_rows > 1 && sink_rows != p.batch)) {
    return "sinks are [0, 1 or B, K, G]";
  }
  if (!ReadType(q.element_type(), p.q_type) || p.q_type > Type::kBfloat16 ||
      q.element_type() != out.element_type()) {
    return "q and the result are float32 or bfloat16";
  }
  if (!ReadType(pool.element_type(), p.pool_type)) return "no cache has this dtype";
  const bool scaled = factors.element_count() > 0;
  if (scaled && !HasShape(factors.dimensions(), {pd[0], pd[1], pd[2], 2, pd[4]})) {
    return "factors are [L, P, K, 2, S]";
  }
  if (scaled != (p.pool_type >= Type::kInt8)) return "codes, and nothing else, have factors";
  if (scaled && p.planes > 2) return "codes are keys and values, or a latent";
  p.value_dim = out.dimensions().size() == 5 ? out.dimensions()[4] : 0;
  if (!HasShape(out.dimensions(), {p.batch, p.tokens, p.heads, p.group, p.value_dim}) ||
      p.value_dim < 1 || p.value_dim > p.width) {
    return "values have 1 to W columns";
  }
  p.q = q.untyped_data(), p.out = out.untyped_data(), p.pool = pool.untyped_data();
  p.factors = scaled ? static_cast<const uint16_t*>(factors.untyped_data()) : nullptr;
  p.layers = layers.typed_data(), p.table = table.typed_data();
  p.positions = positions.typed_data(), p.lengths = lengths.typed_data();
  p.sinks = sink_rows > 0 ? sinks.typed_data() : nullptr;
  p.sink_stride = sink_rows > 1 ? p.heads * p.group : 0;
  return nullptr;
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer pages, Factors factors,
                  Ints layers, Ints table, Ints positions, Ints lengths, Floats sinks,
                  ffi::Result<ffi::AnyBuffer> out, float scale, int64_t window, float softcap,
                  bool turned, int64_t forced, int64_t threads) {
  const int variant = ChosenVariant(forced);
  if (variant < 0) return ffi::Error::InvalidArgument("this processor cannot run that variant");
  Problem problem{};
  const char* fault =
      Read(q, pages, factors, layers, table, positions, lengths, sinks, *out, problem);
  if (fault) return ffi::Error::InvalidArgument(fault);
  problem.scale = scale;
  problem.window = window;
  problem.softcap = softcap;
  problem.turned = turned;
  Run(problem, variant, threads, pool);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace paged_attention
}  // namespace pk

PK_HANDLER(PkPagedAttention, pk::paged_attention::Handle,
           ffi::Ffi::Bind()
               .Ctx<ffi::ThreadPool>()
               .Arg<ffi::AnyBuffer>()
               .Arg<ffi::AnyBuffer>()
               .Arg<ffi::Buffer<ffi::BF16>>()
               .Arg<ffi::Buffer<ffi::S32>>()
               .Arg<ffi::Buffer<ffi::S32>>()
               .Arg<ffi::Buffer<ffi::S32>>()
               .Arg<ffi::Buffer<ffi::S32>>()
               .Arg<ffi::Buffer<ffi::F32>>()
               .Ret<ffi::AnyBuffer>()
               .Attr<float>("scale")
               .Attr<int64_t>("window")
               .Attr<float>("softcap")
               .Attr<bool>("turned")
               .Attr<int64_t>("variant")
               .Attr<int64_t>("threads"));
