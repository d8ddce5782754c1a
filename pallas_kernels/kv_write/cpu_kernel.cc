// Writes one key head of all new tokens.
#include "pallas_kernels/kv_write/cpu_problem.h"
#include "pallas_kernels/native/simd.h"
#include "pallas_kernels/paged_attention/cpu_turn.h"

namespace pk {
namespace PK_VARIANT {
namespace kv_write {

using namespace ::pk::kv_write;

// Added to a number below 2^22, it leaves the number's nearest integer, half to even, in the low
// bits.
constexpr float kRounder = 12582912.0f;

PK_INLINE int8_t ToInt8(float x) {
  return static_cast<int8_t>(static_cast<uint8_t>(ToBits(x + kRounder)));
}

// Rounds to nearest even, as float8_e4m3fn; |x| <= 448.
PK_INLINE int8_t ToFloat8(float x) {
  const uint32_t sign = ToBits(x) >> 24 & 0x80u, size = ToBits(x) & 0x7fffffffu;
  // Below 2^-6 codes count steps of 2^-9; above, three bits follow the leading one.
  const uint32_t small = ToBits(FromBits(size) * 512.0f + kRounder) & 0xffu;
  const uint32_t large = (size + 0x7ffffu + (size >> 20 & 1u) - (120u << 23)) >> 20;
  return static_cast<int8_t>(sign | (size < 121u << 23 ? small : large));
}

PK_INLINE float Clip(float x, float largest) {
  return x > largest ? largest : x < -largest ? -largest : x;
}

// Writes codes of numbers that share a factor, and returns the factor.
template <Type kType>
PK_INLINE uint16_t Encode(const float* from, int64_t count, int8_t* to) {
  constexpr float kLargest = kType == Type::kInt8 ? 127.0f : 448.0f;
  // Sizes compare like their bits, and what is not finite is larger than everything finite.
  uint32_t peak = 0;
  for (int64_t w = 0; w < count; ++w) {
    const uint32_t size = ToBits(from[w]) & 0x7fffffffu;
    peak = size > peak ? size : peak;
  }
  const uint16_t factor = peak < 0x7f800000u ? ToBfloat16(FromBits(peak) / kLargest) : 0x7fc0;
  const float wide = FromBfloat16(factor);
  if (!(wide > 0.0f)) {
    memset(to, 0, static_cast<size_t>(count));
    return factor;
  }
  for (int64_t w = 0; w < count; ++w) {
    const float scaled = Clip(from[w] / wide, kLargest);
    to[w] = kType == Type::kInt8 ? ToInt8(scaled) : ToFloat8(scaled);
  }
  return factor;
}

PK_INLINE void Unpack(const Problem& p, int64_t from, float* to) {
  if (p.token_type == Type::kFloat32) {
    memcpy(to, static_cast<const float*>(p.tokens) + from, p.width * sizeof(float));
    return;
  }
  const uint16_t* halves = static_cast<const uint16_t*>(p.tokens) + from;
  for (int64_t w = 0; w < p.width; ++w) to[w] = FromBfloat16(halves[w]);
}

// Where a token's head lies: `from` counts elements of tokens, `to` rows of the pool's width.
struct Place {
  int64_t from, head, offset;
};

template <Type kType>
PK_INLINE void WriteCodes(const Problem& p, const Place& place, float* row) {
  uint16_t* factors = p.factors + place.head * 2 * p.page_size + place.offset;
  int8_t* to = static_cast<int8_t*>(p.pool);
  to += (place.head * p.planes * p.page_size + place.offset) * p.width;
  Unpack(p, place.from, row);
  if (p.planes == 1) {
    factors[0] = Encode<kType>(row, p.value_dim, to);
    factors[p.page_size] =
        Encode<kType>(row + p.value_dim, p.width - p.value_dim, to + p.value_dim);
    return;
  }
  if (p.turned) paged_attention::Turn(row, p.width);
  factors[0] = Encode<kType>(row, p.width, to);
  Unpack(p, place.from + p.width, row);
  factors[p.page_size] = Encode<kType>(row, p.width, to + p.page_size * p.width);
}

PK_INLINE void WriteFloats(const Problem& p, const Place& place) {
  const int64_t bytes = p.pool_type == Type::kFloat32 ? 4 : 2;
  for (int64_t plane = 0; plane < p.planes; ++plane) {
    const int64_t from = place.from + plane * p.width;
    const int64_t to = ((place.head * p.planes + plane) * p.page_size + place.offset) * p.width;
    char* const row = static_cast<char*>(p.pool) + to * bytes;
    if (p.token_type == p.pool_type) {
      memcpy(row, static_cast<const char*>(p.tokens) + from * bytes, p.width * bytes);
      continue;
    }
    const float* floats = static_cast<const float*>(p.tokens) + from;
    uint16_t* halves = reinterpret_cast<uint16_t*>(row);
    for (int64_t w = 0; w < p.width; ++w) halves[w] = ToBfloat16(floats[w]);
  }
}

PK_INLINE void Write(const Problem& p, const Place& place, float* row) {
  switch (p.pool_type) {
    case Type::kInt8:
      return WriteCodes<Type::kInt8>(p, place, row);
    case Type::kFloat8:
      return WriteCodes<Type::kFloat8>(p, place, row);
    default:
      return WriteFloats(p, place);
  }
}

PK_INLINE bool IsInside(int64_t index, int64_t size) { return index >= 0 && index < size; }

}  // namespace kv_write

// Writes a head's tokens in their order; `row` has room for a row of floats.
void KvWriteHead(const ::pk::kv_write::Problem& problem, int64_t head, float* row) {
  using namespace kv_write;
  const Problem& p = problem;
  for (int64_t token = 0; token < p.batch * p.num_tokens; ++token) {
    const int64_t layer = p.layers[token / p.num_tokens], page = p.pages[token];
    const int64_t offset = p.offsets[token];
    if (!IsInside(layer, p.layers_in_pool) || !IsInside(page, p.num_pages) ||
        !IsInside(offset, p.page_size)) {
      continue;
    }
    const int64_t from = (token * p.heads + head) * p.planes * p.width;
    Write(p, {from, (layer * p.num_pages + page) * p.heads + head, offset}, row);
  }
}

}  // namespace PK_VARIANT
}  // namespace pk
