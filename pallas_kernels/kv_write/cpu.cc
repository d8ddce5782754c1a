// The FFI handler of writing: checks what it is given.
#include "pallas_kernels/kv_write/cpu_run.h"
#include "pallas_kernels/native/export.h"
#include "pallas_kernels/paged_attention/cpu_operands.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pk {
namespace kv_write {
namespace {

using ::pk::paged_attention::HasShape;
using ::pk::paged_attention::ReadType;
using Ints = ffi::Buffer<ffi::S32>;
using Factors = ffi::Buffer<ffi::BF16>;

bool HasKnownTypes(const Problem& p) {
  if (p.pool_type >= Type::kInt8) return p.token_type <= Type::kBfloat16;
  return p.token_type == p.pool_type ||
         (p.token_type == Type::kFloat32 && p.pool_type == Type::kBfloat16);
}

// Fills a problem from the operands; returns what is wrong with them, or null.
const char* Read(ffi::AnyBuffer pool, Factors factors, ffi::AnyBuffer tokens, Ints layers,
                 Ints pages, Ints offsets, Problem& p) {
  const auto pd = pool.dimensions(), td = tokens.dimensions();
  if (pd.size() != 6 || td.size() != 5) return "the pool has 6 axes and tokens have 5";
  p.layers_in_pool = pd[0], p.num_pages = pd[1], p.heads = pd[2], p.planes = pd[3];
  p.page_size = pd[4], p.width = pd[5];
  p.batch = td[0], p.num_tokens = td[1];
  if (!HasShape(td, {p.batch, p.num_tokens, p.heads, p.planes, p.width})) {
    return "tokens have other heads, planes or another width than the pool";
  }
  if (!HasShape(layers.dimensions(), {p.batch}) ||
      !HasShape(pages.dimensions(), {p.batch, p.num_tokens}) ||
      !HasShape(offsets.dimensions(), {p.batch, p.num_tokens})) {
    return "layers, pages and offsets belong to other tokens";
  }
  if (!ReadType(pool.element_type(), p.pool_type) ||
      !ReadType(tokens.element_type(), p.token_type) || !HasKnownTypes(p)) {
    return "tokens of this dtype are not written to a pool of that one";
  }
  const bool coded = p.pool_type >= Type::kInt8;
  if (coded && !HasShape(factors.dimensions(), {pd[0], pd[1], pd[2], 2, pd[4]})) {
    return "factors are [L, P, K, 2, S]";
  }
  if (coded && (p.planes < 1 || p.planes > 2)) return "codes are keys and values, or a latent";
  if (p.planes == 1 && coded && (p.value_dim < 1 || p.value_dim > p.width)) {
    return "values have 1 to W columns";
  }
  if (p.turned && (!coded || p.planes != 2)) return "only keys in codes are turned";
  p.pool = pool.untyped_data(), p.tokens = tokens.untyped_data();
  p.factors = coded ? static_cast<uint16_t*>(factors.untyped_data()) : nullptr;
  p.layers = layers.typed_data(), p.pages = pages.typed_data();
  p.offsets = offsets.typed_data();
  return nullptr;
}

// XLA gives a result the memory of its operand: what is not written stays.
ffi::Error Handle(ffi::ThreadPool threads, ffi::AnyBuffer old_pool, Factors old_factors,
                  ffi::AnyBuffer tokens, Ints layers, Ints pages, Ints offsets,
                  ffi::Result<ffi::AnyBuffer> pool, ffi::Result<Factors> factors,
                  int64_t value_dim, bool turned, int64_t forced, int64_t max_threads) {
  const int variant = ChosenVariant(forced);
  if (variant < 0) return ffi::Error::InvalidArgument("this processor cannot run that variant");
  if (old_pool.untyped_data() != pool->untyped_data() ||
      (factors->element_count() && old_factors.untyped_data() != factors->untyped_data())) {
    return ffi::Error::Internal("a pool is written where it lies, and was given another place");
  }
  Problem problem{};
  problem.value_dim = value_dim;
  problem.turned = turned;
  const char* fault = Read(*pool, *factors, tokens, layers, pages, offsets, problem);
  if (fault) return ffi::Error::InvalidArgument(fault);
  if (tokens.element_count()) Run(problem, variant, max_threads, threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace kv_write
}  // namespace pk

PK_HANDLER(PkKvWrite, pk::kv_write::Handle,
           ffi::Ffi::Bind()
               .Ctx<ffi::ThreadPool>()
               .Arg<ffi::AnyBuffer>()
               .Arg<ffi::Buffer<ffi::BF16>>()
               .Arg<ffi::AnyBuffer>()
               .Arg<ffi::Buffer<ffi::S32>>()
               .Arg<ffi::Buffer<ffi::S32>>()
               .Arg<ffi::Buffer<ffi::S32>>()
               .Ret<ffi::AnyBuffer>()
               .Ret<ffi::Buffer<ffi::BF16>>()
               .Attr<int64_t>("value_dim")
               .Attr<bool>("turned")
               .Attr<int64_t>("variant")
               .Attr<int64_t>("threads"));
