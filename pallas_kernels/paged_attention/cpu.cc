// The FFI handler of paged attention: checks shapes, plans units of work, hands them to threads.
#include <cstring>
#include <vector>

#include "pallas_kernels/native/cpu_features.h"
#include "pallas_kernels/native/export.h"
#include "pallas_kernels/native/float_mode.h"
#include "pallas_kernels/native/parallel_for.h"
#include "pallas_kernels/paged_attention/cpu_problem.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pk {

PK_DECLARE_VARIANTS(
    void PagedAttentionUnit(const ::pk::paged_attention::Problem&,
                            const ::pk::paged_attention::Unit&, float*);
    void PagedAttentionSpan(const ::pk::paged_attention::Problem&,
                            const ::pk::paged_attention::Unit&, int64_t, float*, float*);
    void PagedAttentionMerge(const ::pk::paged_attention::Problem&,
                             const ::pk::paged_attention::Unit&, float*, float*))

namespace paged_attention {
namespace {

// Waking another thread takes some 5 us: as long as this many products of a query with a key's
// elements.
constexpr int64_t kSmallWork = 1 << 17;

// What one thread takes at a time: a whole unit (span -1), or a span of it.
struct Item {
  int64_t unit, span;
  int64_t sums;  // where the span's sums go
};

struct Plan {
  std::vector<int32_t> live_tokens;
  std::vector<Unit> units;
  std::vector<Item> items;
  std::vector<int64_t> split;   // units that are taken span by span
  std::vector<int64_t> sums;    // where the sums of each of them begin
  int64_t sums_floats = 0, scratch_floats = 0, work = 0, products = 0;
};

int64_t Work(const Unit& unit) { return NumSpans(unit) * unit.rows; }

// Cuts the live queries of a sequence into units of nearly equal size, the last ones first: under a
// causal mask they have the most to do.
void AddUnits(const Problem& p, int64_t sequence, int64_t first_live, int64_t num_live,
              Plan& plan) {
  const int64_t rows = num_live * p.group, num_units = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t i = num_units - 1; i >= 0; --i) {
    Unit unit{};
    unit.sequence = sequence;
    unit.first_row = rows * i / num_units / 4 * 4;
    unit.rows = (i + 1 == num_units ? rows : rows * (i + 1) / num_units / 4 * 4) - unit.first_row;
    unit.live_tokens = plan.live_tokens.data() + first_live;
    unit.begin = p.table_width * p.page_size;
    const int64_t last_token = (unit.first_row + unit.rows - 1) / p.group;
    for (int64_t t = unit.first_row / p.group; t <= last_token; ++t) {
      const int64_t token = sequence * p.tokens + unit.live_tokens[t];
      const SeenRange seen = SeenBy(p, sequence, p.positions[token]);
      unit.begin = std::min(unit.begin, seen.begin);
      unit.end = std::max(unit.end, seen.end);
    }
    for (unit.head = 0; unit.head < p.heads; ++unit.head) plan.units.push_back(unit);
  }
}

void FindUnits(const Problem& p, Plan& plan) {
  plan.live_tokens.reserve(p.batch * p.tokens);  // units point into it
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t first = static_cast<int64_t>(plan.live_tokens.size());
    for (int64_t t = 0; t < p.tokens; ++t) {
      const int64_t position = p.positions[b * p.tokens + t];
      const SeenRange seen = SeenBy(p, b, position);
      if (position >= 0 && seen.begin < seen.end) {
        plan.live_tokens.push_back(static_cast<int32_t>(t));
      }
    }
    AddUnits(p, b, first, static_cast<int64_t>(plan.live_tokens.size()) - first, plan);
  }
}

// Splits units that would keep one thread busy while others have run dry.
void FindItems(const Problem& p, int64_t threads, Plan& plan) {
  for (const Unit& unit : plan.units) {
    plan.work += Work(unit);
    plan.products += unit.rows * (unit.end - unit.begin) * p.width;
    plan.scratch_floats = std::max(plan.scratch_floats, ScratchFloats(p, unit.rows));
  }
  for (int64_t u = 0; u < static_cast<int64_t>(plan.units.size()); ++u) {
    const Unit& unit = plan.units[u];
    if (threads == 1 || NumSpans(unit) == 1 || 2 * threads * Work(unit) <= plan.work) {
      plan.items.push_back({u, -1, 0});
      continue;
    }
    plan.split.push_back(u);
    plan.sums.push_back(plan.sums_floats);
    for (int64_t s = 0; s < NumSpans(unit); ++s) {
      plan.items.push_back({u, s, plan.sums_floats});
      plan.sums_floats += SumsFloats(p, unit.rows);
    }
  }
}

// One piece of memory a thread, which grows to the largest call.
float* ThreadScratch(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(floats + 16);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

// Queries that see nothing have no unit; all others are overwritten.
void ClearOutput(const Problem& p) {
  const int64_t bytes = p.q_type == Type::kBfloat16 ? 2 : 4;
  const int64_t count = p.batch * p.tokens * p.heads * p.group * p.value_dim;
  memset(p.out, 0, static_cast<size_t>(count * bytes));
}

template <typename Pool>
void Run(const Problem& p, int variant, int64_t threads, Pool& pool) {
  auto* run_unit = PK_PICK(PagedAttentionUnit, variant);
  auto* run_span = PK_PICK(PagedAttentionSpan, variant);
  auto* merge = PK_PICK(PagedAttentionMerge, variant);
  const int64_t planned = threads > 0 ? threads : std::max<int64_t>(pool.num_threads(), 1);
  Plan plan;
  FindUnits(p, plan);
  if (static_cast<int64_t>(plan.live_tokens.size()) < p.batch * p.tokens) ClearOutput(p);
  FindItems(p, planned, plan);
  const int64_t used = threads == 0 && plan.products < kSmallWork ? 1 : threads;
  std::vector<float> sums(static_cast<size_t>(plan.sums_floats));
  ParallelFor(pool, static_cast<int64_t>(plan.items.size()), [&](int64_t i) {
    const ScopedFloatMode mode;
    const Item& item = plan.items[i];
    float* scratch = ThreadScratch(plan.scratch_floats);
    if (item.span < 0) {
      run_unit(p, plan.units[item.unit], scratch);
    } else {
      run_span(p, plan.units[item.unit], item.span, scratch, sums.data() + item.sums);
    }
  }, used);
  const int64_t merging = plan.sums_floats < kSmallWork ? 1 : used;
  ParallelFor(pool, static_cast<int64_t>(plan.split.size()), [&](int64_t i) {
    const ScopedFloatMode mode;
    float* scratch = ThreadScratch(plan.scratch_floats);
    merge(p, plan.units[plan.split[i]], sums.data() + plan.sums[i], scratch);
  }, merging);
}

bool ReadType(ffi::DataType dtype, Type& type) {
  switch (dtype) {
    case ffi::F32:
      type = Type::kFloat32;
      return true;
    case ffi::BF16:
      type = Type::kBfloat16;
      return true;
    case ffi::F16:
      type = Type::kFloat16;
      return true;
    case ffi::S8:
      type = Type::kInt8;
      return true;
    case ffi::U8:
      type = Type::kFloat8;
      return true;
    default:
      return false;
  }
}

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;
using Factors = ffi::Buffer<ffi::BF16>;

bool HasShape(ffi::AnyBuffer::Dimensions dims, std::initializer_list<int64_t> shape) {
  return std::equal(dims.begin(), dims.end(), shape.begin(), shape.end());
}

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
                  int64_t forced, int64_t threads) {
  const int variant = ChosenVariant(forced);
  if (variant < 0) return ffi::Error::InvalidArgument("this processor cannot run that variant");
  Problem problem{};
  const char* fault =
      Read(q, pages, factors, layers, table, positions, lengths, sinks, *out, problem);
  if (fault) return ffi::Error::InvalidArgument(fault);
  problem.scale = scale;
  problem.window = window;
  problem.softcap = softcap;
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
               .Attr<int64_t>("variant")
               .Attr<int64_t>("threads"));
