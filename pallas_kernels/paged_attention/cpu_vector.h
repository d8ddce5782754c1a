// What attention needs of sixteen lanes beyond native/simd.h: elements of every cache dtype, the
// sums of sixteen vectors at once, exp and tanh.
#ifndef PALLAS_KERNELS_PAGED_ATTENTION_CPU_VECTOR_H_
#define PALLAS_KERNELS_PAGED_ATTENTION_CPU_VECTOR_H_

#include "pallas_kernels/native/simd.h"

namespace pk {
namespace PK_VARIANT {
namespace paged_attention {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
// float8_e4m3fn. It is read as 2^-8 of what it stands for: its bits, but for the sign one place to
// the left, are those of such a half, subnormal ones included.
struct Float8 {
  int8_t bits;
};

// What elements are multiplied with beside their factors.
template <typename Element>
constexpr float kUnit = 1.0f;
template <>
constexpr float kUnit<Float8> = 256.0f;

PK_INLINE Vec LoadElements(const float* from) { return Load(from); }
PK_INLINE float ToFloat32(float x) { return x; }
PK_INLINE float ToFloat32(Bfloat16 x) { return FromBfloat16(x.bits); }
PK_INLINE float ToFloat32(Float16 x) { return FromHalf(x.bits); }
PK_INLINE float ToFloat32(int8_t x) { return static_cast<float>(x); }
PK_INLINE float ToFloat32(Float8 x) {
  return FromHalf(static_cast<uint16_t>(static_cast<uint32_t>(int32_t{x.bits}) << 7 & 0xbfffu));
}

#if defined(PK_SIMD_512)

PK_INLINE __m256i LoadHalves(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
PK_INLINE Vec LoadElements(const Bfloat16* from) {
  return AsFloat(ShiftLeft<16>(_mm512_cvtepu16_epi32(LoadHalves(from))));
}
PK_INLINE Vec LoadElements(const Float16* from) { return _mm512_cvtph_ps(LoadHalves(from)); }
PK_INLINE Vec LoadElements(const int8_t* from) {
  return ToFloat(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
PK_INLINE Vec LoadElements(const Float8* from) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm512_cvtph_ps(
      _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff))));
}
// The larger of two; b where either is NaN.
PK_INLINE Vec Max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
PK_INLINE Vec Div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
PK_INLINE IVec AsWords(Vec a) { return _mm512_castps_si512(a); }
// yes where a < b, no elsewhere.
PK_INLINE Vec SelectLess(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
PK_INLINE float LargestLane(Vec a) { return _mm512_reduce_max_ps(a); }

// Lane i of the result is the sum of all lanes of sums[i], always added in one order.
PK_INLINE Vec SumEach(const Vec* sums) {
  Vec quads[4];
  for (int i = 0; i < 4; ++i) {
    Vec half[2];
    for (int j = 0; j < 2; ++j) {
      const Vec a = sums[8 * j + i], b = sums[8 * j + i + 4];
      half[j] = Add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    quads[i] = Add(_mm512_shuffle_f32x4(half[0], half[1], 0x88),
                   _mm512_shuffle_f32x4(half[0], half[1], 0xdd));
  }
  const Vec low =
      Add(_mm512_unpacklo_ps(quads[0], quads[1]), _mm512_unpackhi_ps(quads[0], quads[1]));
  const Vec high =
      Add(_mm512_unpacklo_ps(quads[2], quads[3]), _mm512_unpackhi_ps(quads[2], quads[3]));
  return Add(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
}

#elif defined(PK_SIMD_256)

PK_INLINE __m128i LoadHalves(const void* from, int index) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from) + index);
}
PK_INLINE Vec LoadElements(const Bfloat16* from) {
  return AsFloat(ShiftLeft<16>(IVec{_mm256_cvtepu16_epi32(LoadHalves(from, 0)),
                                    _mm256_cvtepu16_epi32(LoadHalves(from, 1))}));
}
PK_INLINE Vec LoadElements(const Float16* from) {
  return {_mm256_cvtph_ps(LoadHalves(from, 0)), _mm256_cvtph_ps(LoadHalves(from, 1))};
}
PK_INLINE Vec LoadElements(const int8_t* from) {
  const __m128i bytes = LoadHalves(from, 0);
  return ToFloat(IVec{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}
PK_INLINE Vec LoadElements(const Float8* from) {
  const __m256i words = _mm256_and_si256(
      _mm256_slli_epi16(_mm256_cvtepi8_epi16(LoadHalves(from, 0)), 7),
      _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(words)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
}
PK_INLINE Vec Max(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
PK_INLINE Vec Div(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
PK_INLINE IVec AsWords(Vec x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
PK_INLINE Vec SelectLess(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
PK_INLINE float LargestLane(Vec x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
PK_INLINE __m256 AddHalves(Vec x, Vec y) {
  const __m256 a = _mm256_add_ps(x.a, x.b), b = _mm256_add_ps(y.a, y.b);
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
PK_INLINE __m256 SumEight(const Vec* sums) {
  __m256 quads[4];
  for (int i = 0; i < 4; ++i) quads[i] = AddHalves(sums[i], sums[i + 4]);
  const __m256 low =
      _mm256_add_ps(_mm256_unpacklo_ps(quads[0], quads[1]), _mm256_unpackhi_ps(quads[0], quads[1]));
  const __m256 high =
      _mm256_add_ps(_mm256_unpacklo_ps(quads[2], quads[3]), _mm256_unpackhi_ps(quads[2], quads[3]));
  return _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xee));
}
PK_INLINE Vec SumEach(const Vec* sums) { return {SumEight(sums), SumEight(sums + 8)}; }

#else

template <typename Element>
PK_INLINE Vec LoadElements(const Element* from) {
  Vec out;
  for (int lane = 0; lane < kLanes; ++lane) out.part[lane / 4][lane % 4] = ToFloat32(from[lane]);
  return out;
}
PK_INLINE Vec SelectLess(Vec a, Vec b, Vec yes, Vec no) {
  Vec out;
  for (int i = 0; i < 4; ++i) {
    const Int4 less = (Int4)(a.part[i] < b.part[i]);
    out.part[i] = (Float4)(((Int4)yes.part[i] & less) | ((Int4)no.part[i] & ~less));
  }
  return out;
}
PK_INLINE Vec Max(Vec a, Vec b) { return SelectLess(b, a, a, b); }
PK_INLINE Vec Div(Vec a, Vec b) {
  Vec out;
  for (int i = 0; i < 4; ++i) out.part[i] = a.part[i] / b.part[i];
  return out;
}
PK_INLINE IVec AsWords(Vec a) {
  IVec out;
  memcpy(&out, &a, sizeof(out));
  return out;
}
PK_INLINE float LargestLane(Vec a) {
  float largest = a.part[0][0];
  for (int lane = 1; lane < kLanes; ++lane) {
    const float value = a.part[lane / 4][lane % 4];
    largest = value > largest ? value : largest;
  }
  return largest;
}
PK_INLINE Vec SumEach(const Vec* sums) {
  Vec out;
  for (int i = 0; i < kLanes; ++i) {
    const Vec& s = sums[i];
    const Float4 four = (s.part[0] + s.part[2]) + (s.part[1] + s.part[3]);
    out.part[i / 4][i % 4] = (four[0] + four[2]) + (four[1] + four[3]);
  }
  return out;
}

#endif

PK_INLINE float SumLanes(Vec a) {
  float lanes[kLanes];
  Store(lanes, a);
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

PK_INLINE float FirstLane(Vec a) {
  float lanes[kLanes];
  Store(lanes, a);
  return lanes[0];
}

PK_INLINE Vec LaneIndex() {
  static const float index[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return Load(index);
}

// e^x for x <= 0, to 1 ulp or so: exactly 1 at 0, exactly 0 below -88, NaN for NaN.
// x = n ln 2 + r with |r| <= ln(2) / 2; e^r = 1 + r p(r), where p fits (e^r - 1) / r at Chebyshev's
// points to 5e-9. Adding 1.5 * 2^23 leaves the integer n in the low bits.
PK_INLINE Vec Exp(Vec x) {
  const Vec magic = Broadcast(12582912.0f), one = Broadcast(1.0f);
  x = Max(Broadcast(-88.0f), x);
  const Vec shifted = MulAdd(x, Broadcast(1.44269504f), magic);
  const Vec n = Sub(shifted, magic);
  // ln 2 in two parts, so that n times the first is exact.
  Vec r = MulAdd(n, Broadcast(-0.693359375f), x);
  r = MulAdd(n, Broadcast(2.12194440e-4f), r);
  Vec p = Broadcast(0.001394113409332931f);
  p = MulAdd(p, r, Broadcast(0.008369166404008865f));
  p = MulAdd(p, r, Broadcast(0.04166635125875473f));
  p = MulAdd(p, r, Broadcast(0.16666504740715027f));
  p = MulAdd(p, r, Broadcast(0.5f));
  p = MulAdd(p, r, one);
  p = MulAdd(p, r, one);
  return Mul(p, AsFloat(ShiftLeft<23>(AddWords(AsWords(shifted), BroadcastWord(127)))));
}

PK_INLINE float Exp(float x) { return FirstLane(Exp(Broadcast(x))); }

// Near zero x + x^3 p(x^2), p fitted to 8e-8; elsewhere by way of e^(-2|x|).
PK_INLINE Vec Tanh(Vec x) {
  const IVec sign = And(AsWords(x), BroadcastWord(static_cast<int32_t>(0x80000000u)));
  const Vec size = AsFloat(Xor(AsWords(x), sign)), square = Mul(size, size);
  Vec p = Broadcast(-0.006054082419723272f);
  p = MulAdd(p, square, Broadcast(0.02097349986433983f));
  p = MulAdd(p, square, Broadcast(-0.053847379982471466f));
  p = MulAdd(p, square, Broadcast(0.13332758843898773f));
  p = MulAdd(p, square, Broadcast(-0.333333283662796f));
  const Vec near = MulAdd(Mul(p, square), size, size);
  const Vec e = Exp(Mul(size, Broadcast(-2.0f))), one = Broadcast(1.0f);
  const Vec far = Div(Sub(one, e), Add(one, e));
  return AsFloat(Xor(AsWords(SelectLess(size, Broadcast(0.625f), near, far)), sign));
}

}  // namespace paged_attention
}  // namespace PK_VARIANT
}  // namespace pk

#endif  // PALLAS_KERNELS_PAGED_ATTENTION_CPU_VECTOR_H_
