// The loop of the probe: sums 32-bit words, which the compiler turns into the widest vectors it may.
#include <stdint.h>

namespace pk {
namespace PK_VARIANT {

uint32_t SumWords(const uint32_t* words, int64_t count) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i % 16 == 0) __builtin_prefetch(words + i + 1024);
    sum += words[i];
  }
  return sum;
}

}  // namespace PK_VARIANT
}  // namespace pk
