// Attention on any thread pool: plans units of work and hands them to threads. Free of XLA, so that
// the sanitizers' driver runs the same code.
#ifndef PALLAS_KERNELS_PAGED_ATTENTION_CPU_RUN_H_
#define PALLAS_KERNELS_PAGED_ATTENTION_CPU_RUN_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pallas_kernels/native/cpu_features.h"
#include "pallas_kernels/native/float_mode.h"
#include "pallas_kernels/native/parallel_for.h"
#include "pallas_kernels/native/scratch.h"
#include "pallas_kernels/paged_attention/cpu_problem.h"

namespace pk {

PK_DECLARE_VARIANTS(
    void PagedAttentionUnit(const ::pk::paged_attention::Problem&,
                            const ::pk::paged_attention::Unit&, float*);
    void PagedAttentionSpan(const ::pk::paged_attention::Problem&,
                            const ::pk::paged_attention::Unit&, int64_t, float*, float*);
    void PagedAttentionMerge(const ::pk::paged_attention::Problem&,
                             const ::pk::paged_attention::Unit&, float*, float*))

namespace paged_attention {

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

inline int64_t Work(const Unit& unit) { return NumSpans(unit) * unit.rows; }

// Cuts the live queries of a sequence into units of nearly equal size, the last ones first: under a
// causal mask they have the most to do.
inline void AddUnits(const Problem& p, int64_t sequence, int64_t first_live, int64_t num_live,
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

inline void FindUnits(const Problem& p, Plan& plan) {
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
inline void FindItems(const Problem& p, int64_t threads, Plan& plan) {
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

// Queries that see nothing have no unit; all others are overwritten.
inline void ClearOutput(const Problem& p) {
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

}  // namespace paged_attention
}  // namespace pk

#endif  // PALLAS_KERNELS_PAGED_ATTENTION_CPU_RUN_H_
