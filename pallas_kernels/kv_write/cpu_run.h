// Writing on any thread pool. Free of XLA, so that the sanitizers' driver runs the same code.
#ifndef PALLAS_KERNELS_KV_WRITE_CPU_RUN_H_
#define PALLAS_KERNELS_KV_WRITE_CPU_RUN_H_

#include <cstdint>

#include "pallas_kernels/kv_write/cpu_problem.h"
#include "pallas_kernels/native/cpu_features.h"
#include "pallas_kernels/native/float_mode.h"
#include "pallas_kernels/native/parallel_for.h"
#include "pallas_kernels/native/scratch.h"

namespace pk {

PK_DECLARE_VARIANTS(void KvWriteHead(const ::pk::kv_write::Problem&, int64_t, float*))

namespace kv_write {

// Numbers that one thread writes sooner than another is there to help.
constexpr int64_t kSmallWork = 1 << 14;

// A head is written by one thread: two tokens for one place, as padding has in the trash page, are
// written one after the other, and the later one stays.
template <typename Pool>
void Run(const Problem& p, int variant, int64_t threads, Pool& pool) {
  auto* write_head = PK_PICK(KvWriteHead, variant);
  const int64_t numbers = p.batch * p.num_tokens * p.heads * p.planes * p.width;
  const auto run = [&](int64_t head) {
    const ScopedFloatMode mode;
    write_head(p, head, ThreadScratch(p.width));
  };
  ParallelFor(pool, p.heads, run, threads == 0 && numbers < kSmallWork ? 1 : threads);
}

}  // namespace kv_write
}  // namespace pk

#endif  // PALLAS_KERNELS_KV_WRITE_CPU_RUN_H_
