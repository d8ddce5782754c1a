// New tokens on their way into a pool, as the handler hands them to a variant's loops.
#ifndef PALLAS_KERNELS_KV_WRITE_CPU_PROBLEM_H_
#define PALLAS_KERNELS_KV_WRITE_CPU_PROBLEM_H_

#include <stdint.h>

#include "pallas_kernels/paged_attention/cpu_problem.h"

namespace pk {
namespace kv_write {

using ::pk::paged_attention::Type;

struct Problem {
  void* pool;  // [L, P, K, C, S, W]
  Type pool_type;
  uint16_t* factors;   // [L, P, K, 2, S] bfloat16, or null where numbers are stored as they are
  const void* tokens;  // [B, T, K, C, W] float32, or the pool's dtype; bfloat16 for codes too
  Type token_type;
  const int32_t* layers;   // [B]
  const int32_t* pages;    // [B, T]
  const int32_t* offsets;  // [B, T]
  int64_t batch, num_tokens, heads, planes, width;
  int64_t layers_in_pool, num_pages, page_size;
  int64_t value_dim;  // columns of a latent that have the first factor
  bool turned;        // whether keys are turned before they become codes
};

}  // namespace kv_write
}  // namespace pk

#endif  // PALLAS_KERNELS_KV_WRITE_CPU_PROBLEM_H_
