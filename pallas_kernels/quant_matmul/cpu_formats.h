// How a 64-byte line of packed weights becomes vectors of sixteen floats, one for each k it holds.
//
// A format loads a line with LoadLine and decodes its k = J with Get<J>; quantized values come out
// unscaled. kOfX is a power of two that Get leaves in, and that x is multiplied with beforehand,
// whoever decodes: numbers of x below 2^-102 then count as zero.
#ifndef PALLAS_KERNELS_QUANT_MATMUL_CPU_FORMATS_H_
#define PALLAS_KERNELS_QUANT_MATMUL_CPU_FORMATS_H_

#include "pallas_kernels/native/simd.h"
#include "pallas_kernels/quant_matmul/cpu_problem.h"

#define PK_MEMBER inline __attribute__((always_inline))

namespace pk {
namespace PK_VARIANT {
namespace quant_matmul {

using namespace ::pk::quant_matmul;

struct Float32 {
  using Line = Vec;
  static constexpr int kStep = 1;
  static constexpr float kOfX = 1.0f;
  explicit Float32(float) {}
  PK_MEMBER Line LoadLine(const char* from) const { return Load(reinterpret_cast<const float*>(from)); }
  template <int J>
  PK_MEMBER Vec Get(Line line) const {
    return line;
  }
};

struct Bfloat16 {
  using Line = IVec;
  static constexpr int kStep = 2;
  static constexpr float kOfX = 1.0f;
  IVec high = BroadcastWord(static_cast<int32_t>(0xffff0000u));
  explicit Bfloat16(float) {}
  PK_MEMBER Line LoadLine(const char* from) const { return LoadWords(from); }
  template <int J>
  PK_MEMBER Vec Get(Line line) const {
    return AsFloat(J == 0 ? ShiftLeft<16>(line) : And(line, high));
  }
};

struct Float16 {
  using Line = IVec;
  static constexpr int kStep = 2;
  static constexpr float kOfX = 1.0f;
  explicit Float16(float) {}
  PK_MEMBER Line LoadLine(const char* from) const { return LoadWords(from); }
  template <int J>
  PK_MEMBER Vec Get(Line line) const {
    return HalfToFloat(ShiftRight<16 * J>(line));
  }
};

#if defined(PK_SIMD_256)

// Signed bytes as the highest of a word: one instruction each instead of two, as nothing is shifted
// back. The conversion to floats stays exact.
struct HighBytes {
  static constexpr float kOfX = 1.0f / (1 << 24);
  __m256i second = Control(1), third = Control(2);
  IVec highest = BroadcastWord(static_cast<int32_t>(0xff000000u));

  template <int kByte>
  PK_MEMBER Vec Get(IVec bytes) const {
    if constexpr (kByte == 0) return ToFloat(ShiftLeft<24>(bytes));
    if constexpr (kByte == 3) return ToFloat(And(bytes, highest));
    const __m256i& control = kByte == 1 ? second : third;
    return ToFloat({_mm256_shuffle_epi8(bytes.a, control), _mm256_shuffle_epi8(bytes.b, control)});
  }
  // Moves one byte of every word to its highest; the others become zero.
  PK_INLINE __m256i Control(int byte) {
    const auto word = [&](int at) { return static_cast<int32_t>((at + byte) << 24 | 0x808080); };
    const __m128i half = _mm_setr_epi32(word(0), word(4), word(8), word(12));
    return _mm256_broadcastsi128_si256(half);
  }
};

struct Int8 {
  using Line = IVec;
  static constexpr int kStep = 4;
  static constexpr float kOfX = HighBytes::kOfX;
  HighBytes bytes;
  explicit Int8(float) {}
  PK_MEMBER Line LoadLine(const char* from) const { return LoadWords(from); }
  template <int J>
  PK_MEMBER Vec Get(Line line) const {
    return bytes.template Get<J>(line);
  }
};

// Low nibbles hold k..k+3, high nibbles k+4..k+7. The value of a code is code - offset.
struct Int4 {
  struct Line {
    IVec low, high;
  };
  static constexpr int kStep = 8;
  static constexpr float kOfX = HighBytes::kOfX;
  HighBytes bytes;
  IVec mask = BroadcastWord(0x0f0f0f0f);
  __m256i zero;
  explicit Int4(float offset) : zero(_mm256_set1_epi8(static_cast<char>(offset))) {}
  PK_MEMBER Line LoadLine(const char* from) const {
    const IVec line = LoadWords(from);
    return {Less(And(line, mask)), Less(And(ShiftRight<4>(line), mask))};
  }
  PK_MEMBER IVec Less(IVec codes) const {
    return {_mm256_sub_epi8(codes.a, zero), _mm256_sub_epi8(codes.b, zero)};
  }
  template <int J>
  PK_MEMBER Vec Get(const Line& line) const {
    return bytes.template Get<J % 4>(J < 4 ? line.low : line.high);
  }
};

#else

struct Int8 {
  using Line = IVec;
  static constexpr int kStep = 4;
  static constexpr float kOfX = 1.0f;
  explicit Int8(float) {}
  PK_MEMBER Line LoadLine(const char* from) const { return LoadWords(from); }
  template <int J>
  PK_MEMBER Vec Get(Line line) const {
    return ToFloat(ShiftRightSigned<24>(ShiftLeft<24 - 8 * J>(line)));
  }
};

// Low nibbles hold k..k+3, high nibbles k+4..k+7. The value of a code is code - offset.
struct Int4 {
  using Line = IVec;
  static constexpr int kStep = 8;
  static constexpr float kOfX = 1.0f;
  IVec mask = BroadcastWord(15);
  Vec zero;
  explicit Int4(float offset) : zero(Broadcast(offset)) {}
  PK_MEMBER Line LoadLine(const char* from) const { return LoadWords(from); }
  template <int J>
  PK_MEMBER Vec Get(Line line) const {
    const IVec codes = ShiftRight<(J < 4 ? 8 * J : 8 * (J - 4) + 4)>(line);
    return Sub(ToFloat(And(codes, mask)), zero);
  }
};

#endif

#if defined(PK_SIMD_512)

// The bfloat16 that equals a float8_e4m3fn without its sign: exact, as are subnormals.
constexpr uint16_t Bfloat16OfFloat8(int code) {
  if (code == 0x7f) return 0x7fc0;
  int exponent = code >> 3, fraction = code & 7;
  if (exponent == 0) {
    if (fraction == 0) return 0;
    for (exponent = 1; fraction < 8; fraction *= 2) --exponent;
    fraction -= 8;
  }
  return static_cast<uint16_t>((exponent + 120) << 7 | fraction << 4);
}

struct Float8Table {
  uint16_t values[128];
  constexpr Float8Table() : values() {
    for (int code = 0; code < 128; ++code) values[code] = Bfloat16OfFloat8(code);
  }
};

// float8_e4m3fn: 32 bytes at a time are looked up in a table of bfloat16.
struct Float8 {
  struct Line {
    IVec even, odd;  // pairs of bfloat16: k and k + 2, k + 1 and k + 3
  };
  static constexpr int kStep = 4;
  static constexpr float kOfX = 1.0f;
  static constexpr Float8Table kTable = {};
  IVec table[4], sign = BroadcastWord(static_cast<int32_t>(0x80008000u));
  IVec high = BroadcastWord(static_cast<int32_t>(0xffff0000u));
  explicit Float8(float) {
    Unrolled<4>([&](auto part) PK_INLINED { table[part] = LoadWords(kTable.values + 32 * part); });
  }
  PK_MEMBER Line LoadLine(const char* from) const {
    const IVec line = LoadWords(from), odd = _mm512_srli_epi16(line, 8);
    return {LookUp(line, _mm512_slli_epi16(line, 8)), LookUp(odd, line)};
  }
  // The low seven bits of every 16 are a code; the highest bit of `signs` is its sign.
  PK_MEMBER IVec LookUp(IVec codes, IVec signs) const {
    const IVec low = _mm512_permutex2var_epi16(table[0], codes, table[1]);
    const IVec up = _mm512_permutex2var_epi16(table[2], codes, table[3]);
    const __mmask32 is_up = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
    const IVec magnitude = _mm512_mask_blend_epi16(is_up, low, up);
    return _mm512_ternarylogic_epi32(magnitude, signs, sign, 0xf8);  // magnitude | signs & sign
  }
  template <int J>
  PK_MEMBER Vec Get(Line line) const {
    const IVec pairs = J % 2 ? line.odd : line.even;
    return AsFloat(J < 2 ? ShiftLeft<16>(pairs) : And(pairs, high));
  }
};

#else

// float8_e4m3fn by way of a half with the same bits, 2^-8 of it: exact, subnormals included.
struct Float8 {
  using Line = IVec;
  static constexpr int kStep = 4;
  static constexpr float kOfX = 1.0f;
  IVec sign = BroadcastWord(0x8000), rest = BroadcastWord(0x3f80);
  explicit Float8(float) {}
  PK_MEMBER Line LoadLine(const char* from) const { return LoadWords(from); }
  template <int J>
  PK_MEMBER Vec Get(Line line) const {
    const IVec byte = J == 3 ? ShiftRight<24>(line) : ShiftRight<24>(ShiftLeft<24 - 8 * J>(line));
    const IVec signs = And(ShiftLeft<8>(byte), sign);
    const IVec magnitude = And(ShiftLeft<7>(byte), rest);
    const Vec small = HalfToFloat(Xor(signs, AddWords(magnitude, NanBits(magnitude))));
    return Mul(small, Broadcast(256.0f));
  }
  // 0x7f is the one NaN: its magnitude 0x3f80 is raised above a half's infinity, 0x7c00.
  PK_INLINE IVec NanBits(IVec magnitude) {
    const IVec carry = ShiftRight<14>(AddWords(magnitude, BroadcastWord(0x80)));  // 1 for a NaN
    return ShiftLeft<14>(carry);
  }
};

#endif

}  // namespace quant_matmul
}  // namespace PK_VARIANT
}  // namespace pk

#endif  // PALLAS_KERNELS_QUANT_MATMUL_CPU_FORMATS_H_
