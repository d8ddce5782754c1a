// Sixteen lanes of float or int32 in whatever registers a variant has: one source, every width.
//
// Only for `cpu_kernel*.cc`: all of it lies in the variant's own namespace, so that the linker can
// never put one variant's code in place of another's. No standard C++ header may be used here.
#ifndef PALLAS_KERNELS_NATIVE_SIMD_H_
#define PALLAS_KERNELS_NATIVE_SIMD_H_

#include <stdint.h>
#include <string.h>

#if defined(PK_VARIANT_AVX2) || defined(PK_VARIANT_AVX512) || defined(PK_VARIANT_AVX512BF16)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(PK_VARIANT_AVX512) || defined(PK_VARIANT_AVX512BF16)
#define PK_SIMD_512 1
#elif defined(PK_VARIANT_AVX2)
#define PK_SIMD_256 1
#endif

#define PK_INLINE static inline __attribute__((always_inline))

// For lambdas: between the parameters and the body.
#define PK_INLINED __attribute__((always_inline))

namespace pk {
namespace PK_VARIANT {

constexpr int kLanes = 16;

template <int I>
struct Index {
  constexpr operator int() const { return I; }
};

// Calls body(Index<0>), ... body(Index<N - 1>): a loop over registers. GCC unrolls a plain nest of
// loops too late to keep its arrays out of memory.
template <int N, int I = 0, typename Body>
PK_INLINE void Unrolled(const Body& body) {
  if constexpr (I < N) {
    body(Index<I>());
    Unrolled<N, I + 1>(body);
  }
}

PK_INLINE float FromBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

PK_INLINE uint32_t ToBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

PK_INLINE float FromBfloat16(uint16_t bits) { return FromBits(uint32_t{bits} << 16); }

// Rounds to nearest even; a NaN stays one.
PK_INLINE uint16_t ToBfloat16(float value) {
  const uint32_t bits = ToBits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Exact for every half, subnormal ones included, whether or not the thread flushes denormals.
PK_INLINE float FromHalf(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, exponent = half >> 10 & 31;
  const uint32_t fraction = half & 0x3ff;
  if (exponent == 31) return FromBits(sign | 0x7f800000u | fraction << 13);
  if (exponent) return FromBits(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * FromBits(103u << 23);  // times 2^-24
  return sign ? -magnitude : magnitude;
}

#if defined(PK_SIMD_512)

using Vec = __m512;
using IVec = __m512i;

PK_INLINE Vec Zero() { return _mm512_setzero_ps(); }
PK_INLINE Vec Load(const float* from) { return _mm512_loadu_ps(from); }
PK_INLINE void Store(float* to, Vec a) { _mm512_storeu_ps(to, a); }
PK_INLINE Vec Broadcast(float a) { return _mm512_set1_ps(a); }
PK_INLINE Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
PK_INLINE Vec Sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
PK_INLINE Vec Mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
PK_INLINE Vec MulAdd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
PK_INLINE IVec LoadWords(const void* from) { return _mm512_loadu_si512(from); }
PK_INLINE IVec BroadcastWord(int32_t a) { return _mm512_set1_epi32(a); }
PK_INLINE IVec And(IVec a, IVec b) { return _mm512_and_si512(a, b); }
PK_INLINE IVec Xor(IVec a, IVec b) { return _mm512_xor_si512(a, b); }
template <int kBits>
PK_INLINE IVec ShiftLeft(IVec a) {
  return kBits ? _mm512_slli_epi32(a, kBits) : a;
}
template <int kBits>
PK_INLINE IVec ShiftRight(IVec a) {
  return kBits ? _mm512_srli_epi32(a, kBits) : a;
}
template <int kBits>
PK_INLINE IVec ShiftRightSigned(IVec a) {
  return kBits ? _mm512_srai_epi32(a, kBits) : a;
}
PK_INLINE Vec ToFloat(IVec a) { return _mm512_cvtepi32_ps(a); }
PK_INLINE Vec AsFloat(IVec a) { return _mm512_castsi512_ps(a); }
// The low 16 bits of every lane are a half.
PK_INLINE Vec HalfToFloat(IVec a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
PK_INLINE Vec LoadHalves(const void* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}

#elif defined(PK_SIMD_256)

struct Vec {
  __m256 a, b;
};
struct IVec {
  __m256i a, b;
};

PK_INLINE Vec Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PK_INLINE Vec Load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
PK_INLINE void Store(float* to, Vec v) {
  _mm256_storeu_ps(to, v.a);
  _mm256_storeu_ps(to + 8, v.b);
}
PK_INLINE Vec Broadcast(float v) {
  const __m256 all = _mm256_set1_ps(v);
  return {all, all};
}
PK_INLINE Vec Add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
PK_INLINE Vec Sub(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
PK_INLINE Vec Mul(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
PK_INLINE Vec MulAdd(Vec x, Vec y, Vec z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
PK_INLINE IVec LoadWords(const void* from) {
  const __m256i* words = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
PK_INLINE IVec BroadcastWord(int32_t v) {
  const __m256i all = _mm256_set1_epi32(v);
  return {all, all};
}
PK_INLINE IVec And(IVec x, IVec y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
PK_INLINE IVec Xor(IVec x, IVec y) {
  return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
template <int kBits>
PK_INLINE IVec ShiftLeft(IVec v) {
  return {_mm256_slli_epi32(v.a, kBits), _mm256_slli_epi32(v.b, kBits)};
}
template <int kBits>
PK_INLINE IVec ShiftRight(IVec v) {
  return {_mm256_srli_epi32(v.a, kBits), _mm256_srli_epi32(v.b, kBits)};
}
template <int kBits>
PK_INLINE IVec ShiftRightSigned(IVec v) {
  return {_mm256_srai_epi32(v.a, kBits), _mm256_srai_epi32(v.b, kBits)};
}
PK_INLINE Vec ToFloat(IVec v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
PK_INLINE Vec AsFloat(IVec v) { return {_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)}; }
PK_INLINE Vec HalfToFloat(IVec v) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  const __m256i packed =
      _mm256_packus_epi32(_mm256_and_si256(v.a, mask), _mm256_and_si256(v.b, mask));
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0xd8);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(ordered)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(ordered, 1))};
}
PK_INLINE Vec LoadHalves(const void* from) {
  const __m128i* halves = static_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}

#else  // Vectors of four, which every compiler can lower: SSE2, NEON, or scalars.

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t Uint4 __attribute__((vector_size(16)));
struct Vec {
  Float4 part[4];
};
struct IVec {
  Int4 part[4];
};

#define PK_EACH(Type, expression)                        \
  Type out;                                              \
  for (int i = 0; i < 4; ++i) out.part[i] = (expression); \
  return out

PK_INLINE Vec Broadcast(float a) { PK_EACH(Vec, (Float4{a, a, a, a})); }
PK_INLINE Vec Zero() { return Broadcast(0.0f); }
PK_INLINE Vec Load(const float* from) {
  Vec out;
  memcpy(&out, from, sizeof(out));
  return out;
}
PK_INLINE void Store(float* to, Vec a) { memcpy(to, &a, sizeof(a)); }
PK_INLINE Vec Add(Vec a, Vec b) { PK_EACH(Vec, a.part[i] + b.part[i]); }
PK_INLINE Vec Sub(Vec a, Vec b) { PK_EACH(Vec, a.part[i] - b.part[i]); }
PK_INLINE Vec Mul(Vec a, Vec b) { PK_EACH(Vec, a.part[i] * b.part[i]); }
PK_INLINE Vec MulAdd(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
  PK_EACH(Vec, (Float4)vfmaq_f32((float32x4_t)c.part[i], (float32x4_t)a.part[i],
                                 (float32x4_t)b.part[i]));
#else
  PK_EACH(Vec, a.part[i] * b.part[i] + c.part[i]);
#endif
}
PK_INLINE IVec LoadWords(const void* from) {
  IVec out;
  memcpy(&out, from, sizeof(out));
  return out;
}
PK_INLINE IVec BroadcastWord(int32_t a) { PK_EACH(IVec, (Int4{a, a, a, a})); }
PK_INLINE IVec And(IVec a, IVec b) { PK_EACH(IVec, a.part[i] & b.part[i]); }
PK_INLINE IVec Xor(IVec a, IVec b) { PK_EACH(IVec, a.part[i] ^ b.part[i]); }
template <int kBits>
PK_INLINE IVec ShiftLeft(IVec a) {
  PK_EACH(IVec, (Int4)((Uint4)a.part[i] << kBits));
}
template <int kBits>
PK_INLINE IVec ShiftRight(IVec a) {
  PK_EACH(IVec, (Int4)((Uint4)a.part[i] >> kBits));
}
template <int kBits>
PK_INLINE IVec ShiftRightSigned(IVec a) {
  PK_EACH(IVec, a.part[i] >> kBits);
}
PK_INLINE Vec ToFloat(IVec a) { PK_EACH(Vec, __builtin_convertvector(a.part[i], Float4)); }
PK_INLINE Vec AsFloat(IVec a) { PK_EACH(Vec, (Float4)a.part[i]); }
PK_INLINE Vec HalfToFloat(IVec a) {
  Vec out;
  for (int lane = 0; lane < kLanes; ++lane) {
    out.part[lane / 4][lane % 4] = FromHalf(static_cast<uint16_t>(a.part[lane / 4][lane % 4]));
  }
  return out;
}
#undef PK_EACH
PK_INLINE Vec LoadHalves(const void* from) {
  Vec out;
  for (int lane = 0; lane < kLanes; ++lane) {
    uint16_t half;
    memcpy(&half, static_cast<const char*>(from) + 2 * lane, sizeof(half));
    out.part[lane / 4][lane % 4] = FromHalf(half);
  }
  return out;
}

#endif

PK_INLINE IVec AddWords(IVec a, IVec b);

// Adds to every lane the dot product of its four bytes with the four signed bytes of x. Exact.
//   DotSmall: the weight's bytes are 0..15.
//   DotBytes: they are what PrepareBytes made of signed bytes; the sum is too large by kByteOffset
//             times the sum of x's bytes. x's bytes are -127..127.
#if defined(PK_SIMD_512)
constexpr int kByteOffset = 128;
PK_INLINE IVec AddWords(IVec a, IVec b) { return _mm512_add_epi32(a, b); }
PK_INLINE IVec PrepareBytes(IVec w) {
  return Xor(w, BroadcastWord(static_cast<int32_t>(0x80808080u)));
}
PK_INLINE IVec DotBytes(IVec sum, IVec w, int32_t x) {
  // GCC 12 copies the sums around the intrinsic, and spills when there are 24 of them.
  const IVec all = BroadcastWord(x);
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(all));
  return sum;
}
PK_INLINE IVec DotSmall(IVec sum, IVec w, int32_t x) { return DotBytes(sum, w, x); }
#elif defined(PK_SIMD_256)
constexpr int kByteOffset = 0;
PK_INLINE IVec AddWords(IVec x, IVec y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
PK_INLINE IVec PrepareBytes(IVec w) { return w; }
PK_INLINE __m256i DotPairs(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
  const __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// |w| <= 128 and |x| <= 127: two products stay below 2^15, where maddubs would saturate.
PK_INLINE IVec DotBytes(IVec sum, IVec w, int32_t x) {
  const __m256i all = _mm256_set1_epi32(x);
  return {DotPairs(sum.a, _mm256_abs_epi8(w.a), _mm256_sign_epi8(all, w.a)),
          DotPairs(sum.b, _mm256_abs_epi8(w.b), _mm256_sign_epi8(all, w.b))};
}
PK_INLINE IVec DotSmall(IVec sum, IVec w, int32_t x) {
  const __m256i all = _mm256_set1_epi32(x);
  return {DotPairs(sum.a, w.a, all), DotPairs(sum.b, w.b, all)};
}
#else
constexpr int kByteOffset = 0;
PK_INLINE IVec AddWords(IVec a, IVec b) {
  IVec out;
  for (int i = 0; i < 4; ++i) out.part[i] = a.part[i] + b.part[i];
  return out;
}
PK_INLINE IVec PrepareBytes(IVec w) { return w; }
template <int kByte>
PK_INLINE IVec ByteProduct(IVec w, int32_t x) {
  const IVec byte = ShiftRightSigned<24>(ShiftLeft<24 - 8 * kByte>(w));
  const int32_t factor = static_cast<int8_t>(static_cast<uint32_t>(x) >> 8 * kByte);
  IVec out;
  for (int i = 0; i < 4; ++i) out.part[i] = byte.part[i] * factor;
  return out;
}
PK_INLINE IVec DotBytes(IVec sum, IVec w, int32_t x) {
  const IVec low = AddWords(ByteProduct<0>(w, x), ByteProduct<1>(w, x));
  const IVec high = AddWords(ByteProduct<2>(w, x), ByteProduct<3>(w, x));
  return AddWords(sum, AddWords(low, high));
}
PK_INLINE IVec DotSmall(IVec sum, IVec w, int32_t x) { return DotBytes(sum, w, x); }
#endif

}  // namespace PK_VARIANT
}  // namespace pk

#endif  // PALLAS_KERNELS_NATIVE_SIMD_H_
