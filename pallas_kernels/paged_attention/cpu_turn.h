// The turn of queries and keys that `hadamard.py` describes, of one head.
#ifndef PALLAS_KERNELS_PAGED_ATTENTION_CPU_TURN_H_
#define PALLAS_KERNELS_PAGED_ATTENTION_CPU_TURN_H_

#include "pallas_kernels/native/simd.h"

namespace pk {
namespace PK_VARIANT {
namespace paged_attention {

// Row i, column j of Sylvester's matrix: -1 to the number of bits that i and j have in common.
struct Sylvester {
  float rows[kLanes][kLanes] = {};
  constexpr Sylvester() {
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < kLanes; ++j) rows[i][j] = __builtin_popcount(i & j) % 2 ? -1.0f : 1.0f;
    }
  }
};

// Multiplies every sixteen numbers with Sylvester's matrix.
PK_INLINE void TurnLanes(float* x, int64_t width) {
  static constexpr Sylvester matrix;
  for (int64_t w = 0; w < width; w += kLanes) {
    Vec even = Zero(), odd = Zero();
    for (int i = 0; i < kLanes; i += 2) {
      even = MulAdd(Broadcast(x[w + i]), Load(matrix.rows[i]), even);
      odd = MulAdd(Broadcast(x[w + i + 1]), Load(matrix.rows[i + 1]), odd);
    }
    Store(x + w, Add(even, odd));
  }
}

// Turns a row in blocks of the largest power of two that divides its width: log2 of that many steps,
// each of sums and differences; the first four of them at once where a block fills vectors.
PK_INLINE void Turn(float* x, int64_t width) {
  const int64_t size = width & -width;
  int64_t half = 1;
  if (size >= kLanes) {
    TurnLanes(x, width);
    half = kLanes;
  }
  for (; half < size; half *= 2) {
    for (int64_t block = 0; block < width; block += 2 * half) {
      for (int64_t w = block; w < block + half; ++w) {
        const float a = x[w], b = x[w + half];
        x[w] = a + b;
        x[w + half] = a - b;
      }
    }
  }
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(size));
  for (int64_t w = 0; w < width; ++w) x[w] *= scale;
}

}  // namespace paged_attention
}  // namespace PK_VARIANT
}  // namespace pk

#endif  // PALLAS_KERNELS_PAGED_ATTENTION_CPU_TURN_H_
