// Packing x for the tiles: the rows of a tile side by side, as floats, halves or bytes.
#ifndef PALLAS_KERNELS_QUANT_MATMUL_CPU_PACK_H_
#define PALLAS_KERNELS_QUANT_MATMUL_CPU_PACK_H_

#include "pallas_kernels/quant_matmul/cpu_tiles.h"

namespace pk {
namespace PK_VARIANT {
namespace quant_matmul {

int64_t TileRows(const Problem& p, int64_t tile) {
  const int64_t rest = p.rows - tile * p.plan.rows_per_tile;
  return p.plan.direct || rest > 4 ? p.plan.rows_per_tile : Min(4, p.plan.rows_per_tile);
}

// Bytes of one packed element of x.
int64_t PackedBytes(const Problem& p) {
  if (const int digits = Digits(p)) return digits;
  return p.activations == kActBfloat16 && kHasBfloat16Dot ? 2 : 4;
}

void ReadRow(const Problem& p, int64_t row, int64_t begin, int64_t end, float* to) {
  const int64_t live = Min(end, p.num_in) - begin;
  if (p.x_is_bfloat16) {
    const uint16_t* from = static_cast<const uint16_t*>(p.x) + row * p.num_in + begin;
    for (int64_t k = 0; k < live; ++k) to[k] = FromBfloat16(from[k]);
  } else if (live > 0) {
    const float* from = static_cast<const float*>(p.x) + row * p.num_in + begin;
    memcpy(to, from, sizeof(float) * static_cast<size_t>(live));
  }
  for (int64_t k = live > 0 ? live : 0; k < end - begin; ++k) to[k] = 0.0f;
}

// Eight sums side by side: a fixed order that vectors can follow.
float SumOf(const float* values, int64_t count) {
  float part[8] = {};
  int64_t k = 0;
  for (; k + 8 <= count; k += 8) {
    for (int i = 0; i < 8; ++i) part[i] += values[k + i];
  }
  for (; k < count; ++k) part[k % 8] += values[k];
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

// Rounds a chunk to codes of at most 127 and returns its scale. A chunk with a NaN or an infinity
// has no codes: its scale is NaN, and so is what its row comes to.
float QuantizeChunk(const float* values, int64_t count, int8_t* codes, int32_t* code_sum) {
  int32_t largest = 0;
  for (int64_t k = 0; k < count; ++k) {
    const int32_t magnitude = static_cast<int32_t>(ToBits(values[k]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  *code_sum = 0;
  const float peak = FromBits(static_cast<uint32_t>(largest));
  const bool is_finite = largest < 0x7f800000;
  // Below that, 127 / peak overflows: the chunk counts as zero, as denormals do.
  if (!is_finite || peak < 1e-36f) {
    memset(codes, 0, static_cast<size_t>(count));
    return is_finite ? 0.0f : FromBits(0x7fc00000u);
  }
  const float inverse = 127.0f / peak;
  int32_t sum = 0;
  for (int64_t k = 0; k < count; ++k) {
    // Adding 1.5 * 2^23 rounds to the nearest even integer, which the low bits then hold.
    const uint32_t bits = ToBits(values[k] * inverse + 12582912.0f);
    const int8_t code = static_cast<int8_t>(bits);
    codes[k] = code;
    sum += code;
  }
  *code_sum = sum;
  return peak / 127.0f;
}

#if defined(PK_SIMD_512)

// Cuts a chunk into numbers of three signed bytes, in units of a power of two, and returns the unit:
// 2^-22 of the largest magnitude or less. An element is off by half a unit at most, as much as the
// sum of a float chain is; chunks below 1e-31 count as zero. Bytes of 4 elements lie together, the
// highest digit first; `stride` is the way to the next four. `values` has room for whole vectors.
float SplitChunk(float* values, int64_t count, int64_t stride, char* to, int32_t* digit_sums) {
  for (int64_t k = count; k % kLanes; ++k) values[k] = 0.0f;
  __m512i largest = _mm512_setzero_si512();
  for (int64_t k = 0; k < count; k += kLanes) {
    const __m512i bits = _mm512_castps_si512(Load(values + k));
    largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  }
  const int32_t peak = _mm512_reduce_max_epi32(largest);
  // 127.5 / 128 of a power of two is the most that three bytes hold: above it, the next one counts.
  const float raised = FromBits(static_cast<uint32_t>(peak)) * 1.0078125f;
  const int32_t exponent = static_cast<int32_t>(ToBits(raised) >> 23) - 22;
  const bool is_finite = peak < 0x7f800000, is_zero = is_finite && exponent < 2;
  const float unit = FromBits(is_finite ? static_cast<uint32_t>(exponent) << 23 : 0x7fc00000u);
  const float inverse = is_finite && !is_zero ? FromBits(static_cast<uint32_t>(254 - exponent) << 23) : 0.0f;
  __m512i sums[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  const __m512i half = _mm512_set1_epi32(128);
  for (int64_t k = 0; k < count; k += kLanes) {
    const Vec scaled = Mul(Load(values + k), Broadcast(inverse));
    // Without codes: a zero chunk, or one whose unit is NaN already.
    __m512i rest = inverse == 0.0f ? _mm512_setzero_si512() : _mm512_cvtps_epi32(scaled);
    int32_t bytes[3][4];
    for (int digit = 2; digit >= 0; --digit) {
      sums[digit] = _mm512_add_epi32(sums[digit], rest);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes[digit]), _mm512_cvtepi32_epi8(rest));
      rest = _mm512_srai_epi32(_mm512_add_epi32(rest, half), 8);
    }
    for (int64_t four = 0; four < 4 && k + 4 * four < count; ++four) {
      const int32_t digits[3] = {bytes[0][four], bytes[1][four], bytes[2][four]};
      memcpy(to + (k / 4 + four) * stride, digits, sizeof(digits));
    }
  }
  // So far a sum holds what the higher digits stand for, too.
  const int32_t high = _mm512_reduce_add_epi32(sums[0]), middle = _mm512_reduce_add_epi32(sums[1]);
  digit_sums[0] = high;
  digit_sums[1] = middle - 256 * high;
  digit_sums[2] = _mm512_reduce_add_epi32(sums[2]) - 256 * middle;
  return is_zero ? 0.0f : unit;
}
#else
float SplitChunk(float*, int64_t, int64_t, char*, int32_t*) { return 0.0f; }  // never called
#endif

constexpr int64_t kMaxChunk = 256;

#if defined(PK_VARIANT_AVX512BF16)
// Rounds to pairs of bfloat16, `rows` words apart. `values` has room for whole vectors.
void PackPairs(float* values, int64_t count, int64_t rows, int64_t row, char* to) {
  for (int64_t k = count; k % kLanes; ++k) values[k] = 0.0f;
  for (int64_t k = 0; k < count; k += kLanes) {
    uint32_t pairs[kLanes / 2];
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(Load(values + k)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs), rounded);
    char* const first = to + (k / 2 * rows + row) * 4;
    const int64_t num_pairs = Min(kLanes / 2, (count - k) / 2);
    for (int64_t i = 0; i < num_pairs; ++i) memcpy(first + i * rows * 4, &pairs[i], 4);
  }
}
#else
void PackPairs(float*, int64_t, int64_t, int64_t, char*) {}  // never called
#endif

// Writes one chunk of one row between the tile's other rows.
void PackChunk(const Problem& p, float* values, int64_t count, int64_t rows, int64_t row,
               int64_t index, char* to) {
  if (p.activations == kActInt8) {
    int8_t codes[kMaxChunk];
    p.x_scale[index] = QuantizeChunk(values, count, codes, &p.x_code_sum[index]);
    p.x_sum[index] = p.x_scale[index] * static_cast<float>(p.x_code_sum[index]);
    for (int64_t k = 0; k < count; k += 4) memcpy(to + (k * rows + 4 * row), codes + k, 4);
    return;
  }
  if (Digits(p) == 3) {
    int32_t* const sums = p.x_code_sum + index * 3;
    p.x_scale[index] = SplitChunk(values, count, rows * 12, to + row * 12, sums);
    // Minimums multiply the same rounded numbers as codes do: then what these are off by counts as
    // often as a weight is large, and not as its code is.
    const int64_t sum = int64_t{65536} * sums[0] + 256 * sums[1] + sums[2];
    p.x_sum[index] = p.x_scale[index] * static_cast<float>(sum);
    return;
  }
  if (p.minimums) p.x_sum[index] = SumOf(values, count);
  if (p.activations == kActBfloat16 && kHasBfloat16Dot) return PackPairs(values, count, rows, row, to);
  float* floats = reinterpret_cast<float*>(to);
  const bool round = p.activations == kActBfloat16;
  const float factor = FactorOfX(p);
  for (int64_t k = 0; k < count; ++k) {
    floats[k * rows + row] = factor * (round ? FromBfloat16(ToBfloat16(values[k])) : values[k]);
  }
}

// Packs the rows of one tile; rows beyond the last are zero.
void PackTile(const Problem& p, int64_t tile) {
  const int64_t rows = TileRows(p, tile), first = tile * p.plan.rows_per_tile;
  const int64_t element = PackedBytes(p);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t chunk = 0; chunk < p.chunks; ++chunk) {
      float values[kMaxChunk];
      const int64_t begin = chunk * p.chunk, count = ChunkLength(p, chunk);
      if (first + row < p.rows) {
        ReadRow(p, first + row, begin, begin + count, values);
      } else {
        memset(values, 0, sizeof(float) * static_cast<size_t>(count));
      }
      PackChunk(p, values, count, rows, row,
                tile * p.chunks * p.plan.rows_per_tile + chunk * rows + row,
                p.packed + tile * p.packed_tile_bytes + begin * rows * element);
    }
  }
}

}  // namespace quant_matmul
}  // namespace PK_VARIANT
}  // namespace pk

#endif  // PALLAS_KERNELS_QUANT_MATMUL_CPU_PACK_H_
