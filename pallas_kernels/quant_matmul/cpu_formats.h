// How a 64-byte line of packed weights becomes vectors of sixteen floats, one for each k it holds.
//
// A format loads a line with Load and decodes its k = J with Get<J>; quantized values come out
// unscaled. kFactor is a power of two that Get leaves out and the scale makes up for.
#ifndef PALLAS_KERNELS_QUANT_MATMUL_CPU_FORMATS_H_
#define PALLAS_KERNELS_QUANT_MATMUL_CPU_FORMATS_H_

#include "pallas_kernels/native/simd.h"
#include "pallas_kernels/quant_matmul/cpu_problem.h"

namespace pk {
namespace PK_VARIANT {
namespace quant_matmul {

using namespace ::pk::quant_matmul;

struct Float32 {
  using Line = Vec;
  static constexpr int kStep = 1, kUnroll = 4;
  static constexpr float kFactor = 1.0f;
  explicit Float32(float) {}
  PK_INLINE Line LoadLine(const char* from) { return Load(reinterpret_cast<const float*>(from)); }
  template <int J>
  PK_INLINE Vec Get(const Float32&, Line line) {
    return line;
  }
};

struct Bfloat16 {
  using Line = IVec;
  static constexpr int kStep = 2, kUnroll = 2;
  static constexpr float kFactor = 1.0f;
  IVec high = BroadcastWord(static_cast<int32_t>(0xffff0000u));
  explicit Bfloat16(float) {}
  PK_INLINE Line LoadLine(const char* from) { return LoadWords(from); }
  template <int J>
  PK_INLINE Vec Get(const Bfloat16& format, Line line) {
    return AsFloat(J == 0 ? ShiftLeft<16>(line) : And(line, format.high));
  }
};

struct Float16 {
  using Line = IVec;
  static constexpr int kStep = 2, kUnroll = 2;
  static constexpr float kFactor = 1.0f;
  explicit Float16(float) {}
  PK_INLINE Line LoadLine(const char* from) { return LoadWords(from); }
  template <int J>
  PK_INLINE Vec Get(const Float16&, Line line) {
    return HalfToFloat(ShiftRight<16 * J>(line));
  }
};

struct Int8 {
  using Line = IVec;
  static constexpr int kStep = 4, kUnroll = 1;
  static constexpr float kFactor = 1.0f;
  explicit Int8(float) {}
  PK_INLINE Line LoadLine(const char* from) { return LoadWords(from); }
  template <int J>
  PK_INLINE Vec Get(const Int8&, Line line) {
    return ToFloat(ShiftRightSigned<24>(ShiftLeft<24 - 8 * J>(line)));
  }
};

// Low nibbles hold k..k+3, high nibbles k+4..k+7. The value of a code is code - offset.
struct Int4 {
  using Line = IVec;
  static constexpr int kStep = 8, kUnroll = 1;
  static constexpr float kFactor = 1.0f;
#if defined(PK_SIMD_512)
  Vec values;  // of the sixteen codes: a permutation looks them up, and ignores higher bits
  explicit Int4(float offset)
      : values(Sub(ToFloat(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)),
                   Broadcast(offset))) {}
#else
  IVec mask = BroadcastWord(15);
  Vec zero;
  explicit Int4(float offset) : zero(Broadcast(offset)) {}
#endif
  PK_INLINE Line LoadLine(const char* from) { return LoadWords(from); }
  template <int J>
  PK_INLINE Vec Get(const Int4& format, Line line) {
    const IVec codes = ShiftRight<(J < 4 ? 8 * J : 8 * (J - 4) + 4)>(line);
#if defined(PK_SIMD_512)
    return _mm512_permutexvar_ps(codes, format.values);
#else
    return Sub(ToFloat(And(codes, format.mask)), format.zero);
#endif
  }
};

// float8_e4m3fn by way of a half with the same bits, 2^8 too small: exact, subnormals included.
struct Float8 {
  using Line = IVec;
  static constexpr int kStep = 4, kUnroll = 1;
  static constexpr float kFactor = 256.0f;
  IVec sign = BroadcastWord(0x8000), rest = BroadcastWord(0x3f80);
  explicit Float8(float) {}
  PK_INLINE Line LoadLine(const char* from) { return LoadWords(from); }
  template <int J>
  PK_INLINE Vec Get(const Float8& format, Line line) {
    const IVec byte = J == 3 ? ShiftRight<24>(line) : ShiftRight<24>(ShiftLeft<24 - 8 * J>(line));
    const IVec signs = And(ShiftLeft<8>(byte), format.sign);
    const IVec magnitude = And(ShiftLeft<7>(byte), format.rest);
    return HalfToFloat(Xor(signs, AddWords(magnitude, NanBits(magnitude))));
  }
  // 0x7f is the one NaN: its magnitude 0x3f80 is raised above a half's infinity, 0x7c00.
  PK_INLINE IVec NanBits(IVec magnitude) {
    const IVec carry = ShiftRight<14>(AddWords(magnitude, BroadcastWord(0x80)));  // 1 for a NaN
    return ShiftLeft<14>(carry);
  }
};

}  // namespace quant_matmul
}  // namespace PK_VARIANT
}  // namespace pk

#endif  // PALLAS_KERNELS_QUANT_MATMUL_CPU_FORMATS_H_
