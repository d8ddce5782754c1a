// The register tiles of the product with packed weights: rows x blocks of sums over a run of chunks.
//
// Where the processor multiplies bytes, float activations are cut into three of them (cpu_pack.h):
// three integer products replace the decoding of every weight, and a chunk's sums are exact.
#ifndef PALLAS_KERNELS_QUANT_MATMUL_CPU_TILES_H_
#define PALLAS_KERNELS_QUANT_MATMUL_CPU_TILES_H_

#include "pallas_kernels/quant_matmul/cpu_formats.h"
#include "pallas_kernels/quant_matmul/cpu_problem.h"

namespace pk {
namespace PK_VARIANT {
namespace quant_matmul {

#if defined(PK_SIMD_512)
constexpr bool kSplitsFloats = true;
#else
constexpr bool kSplitsFloats = false;
#endif

// Bytes that an element of x is cut into for products with codes; 0: it stays a float.
PK_INLINE int Digits(const Problem& p) {
  if (p.activations == kActInt8) return 1;
  const bool has_codes = p.format == kInt8 || p.format == kInt4;
  return kSplitsFloats && has_codes ? 3 : 0;
}

// A row's bits do not depend on how many rows there are, so x is the same for every tile.
PK_INLINE float FactorOfX(const Problem& p) {
  return p.format == kInt8 ? Int8::kOfX : p.format == kInt4 ? Int4::kOfX : 1.0f;
}

constexpr int64_t kPrefetchBytes = 1536;  // ahead, in each of a tile's streams

struct TileArgs {
  const char* weights;  // the first block, at the panel's first chunk
  int64_t block_stride, valid_blocks;
  int64_t limit, jump;  // where a block's stream ends, and the way to the next tile's
  const char* x;        // the packed tile, at the panel's first chunk
  int64_t x_row;        // index of (tile, chunk 0) in the arrays of x's sums and scales
  int64_t first_block;
  int64_t chunk_begin, chunk_end;
  float* totals;  // [rows][blocks][16]
};

PK_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

// The pointers of a tile's blocks. A tile at the edge repeats its last block and drops the result.
template <int NB>
struct Streams {
  const char* weights[NB];
  const char* scales[NB];
  const char* minimums[NB];
  int64_t scale_step, scale_ahead;
  bool are_half;

  Streams(const Problem& p, const TileArgs& a) : are_half(p.scales_are_half) {
    const int64_t bytes = kLanes * (are_half ? 2 : 4);
    scale_step = p.groups == 1 ? 0 : bytes;
    scale_ahead = NB * p.groups * bytes;  // the next tile's
    for (int n = 0; n < NB; ++n) {
      const int64_t block = Min(n, a.valid_blocks - 1);
      const int64_t at = (a.first_block + block) * p.groups * bytes + a.chunk_begin * scale_step;
      weights[n] = a.weights + block * a.block_stride;
      scales[n] = p.scales ? p.scales + at : nullptr;
      minimums[n] = p.minimums ? p.minimums + at : nullptr;
    }
  }

  PK_INLINE int64_t Ahead(const TileArgs& a, int64_t at) {
    at += kPrefetchBytes;
    return at < a.limit ? at : at + a.jump;
  }
  inline __attribute__((always_inline)) Vec Read(const char* shared) const {
    return are_half ? LoadHalves(shared) : Load(reinterpret_cast<const float*>(shared));
  }
  inline __attribute__((always_inline)) void NextChunk() {
    for (int n = 0; n < NB; ++n) {
      if (scales[n]) __builtin_prefetch((scales[n] += scale_step) + scale_ahead, 0, 2);
      if (minimums[n]) __builtin_prefetch((minimums[n] += scale_step) + scale_ahead, 0, 2);
    }
  }
};

// The sums of finished chunks. A few stay in registers; many would crowd out the chunk's own sums,
// and lie in memory, where each is touched once a chunk.
template <int MB, int NB, int D = 1>
struct Totals {
  static constexpr bool kInMemory = MB * NB > 8 || MB * NB * D > 12;
  float* memory;  // [rows][blocks][16]
  Vec held[kInMemory ? 1 : NB][kInMemory ? 1 : MB];

  explicit Totals(const TileArgs& a) : memory(a.totals) {
    Each([&](auto n, auto m) PK_INLINED {
      if constexpr (!kInMemory) {
        held[n][m] = a.chunk_begin ? Load(At(n, m)) : Zero();
      } else if (!a.chunk_begin) {
        Store(At(n, m), Zero());
      }
    });
  }
  template <typename Body>
  PK_INLINE void Each(const Body& body) {
    Unrolled<NB>([&](auto n) PK_INLINED { Unrolled<MB>([&](auto m) PK_INLINED { body(n, m); }); });
  }
  inline __attribute__((always_inline)) float* At(int n, int m) const { return memory + (m * NB + n) * kLanes; }
  inline __attribute__((always_inline)) Vec Get(int n, int m) const {
    if constexpr (kInMemory) {
      return Load(At(n, m));
    } else {
      return held[n][m];
    }
  }
  inline __attribute__((always_inline)) void Set(int n, int m, Vec total) {
    if constexpr (kInMemory) {
      Store(At(n, m), total);
    } else {
      held[n][m] = total;
    }
  }
  inline __attribute__((always_inline)) void Save() const {
    if constexpr (!kInMemory) {
      Each([&](auto n, auto m) PK_INLINED { Store(At(n, m), held[n][m]); });
    }
  }
};

PK_INLINE int64_t ChunkLength(const Problem& p, int64_t chunk) {
  return Min(p.chunk, p.padded_in - chunk * p.chunk);
}

// Adds the products of one line, whose step consecutive k are unrolled by recursion over J.
template <class Format, int MB, int NB, int J = 0>
PK_INLINE void AddLine(const Format& format, const typename Format::Line (&lines)[NB],
                       const float* x, Vec (&sum)[NB][MB]) {
  Vec values[NB];
  Unrolled<NB>([&](auto n) PK_INLINED { values[n] = format.template Get<J>(lines[n]); });
  Unrolled<MB>([&](auto m) PK_INLINED {
    const Vec factor = Broadcast(x[J * MB + m]);
    Unrolled<NB>([&](auto n) PK_INLINED { sum[n][m] = MulAdd(values[n], factor, sum[n][m]); });
  });
  if constexpr (J + 1 < Format::kStep) AddLine<Format, MB, NB, J + 1>(format, lines, x, sum);
}

// Float activations: exact products with the decoded weights.
template <class Format, int MB, int NB>
void FloatTile(const Problem& p, const TileArgs& a) {
  const Format format(p.offset);
  Streams<NB> streams(p, a);
  Totals<MB, NB> totals(a);
  const float* x = reinterpret_cast<const float*>(a.x);
  const float* x_sum = p.x_sum + a.x_row + a.chunk_begin * MB;
  int64_t at = 0;
  for (int64_t chunk = a.chunk_begin; chunk < a.chunk_end; ++chunk, x_sum += MB) {
    Vec sum[NB][MB];
    Totals<MB, NB>::Each([&](auto n, auto m) PK_INLINED { sum[n][m] = Zero(); });
    const int64_t end = at + ChunkLength(p, chunk) / Format::kStep * 64;
#pragma GCC unroll 2
    for (; at < end; at += 64, x += Format::kStep * MB) {
      typename Format::Line lines[NB];
      const int64_t ahead = streams.Ahead(a, at);
      Unrolled<NB>([&](auto n) PK_INLINED {
        lines[n] = format.LoadLine(streams.weights[n] + at);
        __builtin_prefetch(streams.weights[n] + ahead, 0, 2);
      });
      AddLine<Format, MB, NB>(format, lines, x, sum);
    }
    Totals<MB, NB>::Each([&](auto n, auto m) PK_INLINED {
      if (!p.scales) {
        totals.Set(n, m, Add(totals.Get(n, m), sum[n][m]));
        return;
      }
      const Vec scale = streams.Read(streams.scales[n]);
      Vec total = MulAdd(sum[n][m], scale, totals.Get(n, m));
      if (p.minimums) total = MulAdd(streams.Read(streams.minimums[n]), Broadcast(x_sum[m]), total);
      totals.Set(n, m, total);
    });
    streams.NextChunk();
  }
  totals.Save();
}

// Adds the products of one line's codes with MB rows of bytes.
template <class Format, int MB, int NB>
PK_INLINE void AddCodes(const IVec (&lines)[NB], const char* x, IVec (&sum)[NB][MB]) {
  constexpr bool kNibbles = Format::kStep == 8;
  const IVec mask = BroadcastWord(0x0f0f0f0f);
  Unrolled<Format::kStep / 4>([&](auto half) PK_INLINED {
    IVec codes[NB];
    Unrolled<NB>([&](auto n) PK_INLINED {
      if constexpr (!kNibbles) {
        codes[n] = PrepareBytes(lines[n]);
      } else {
        codes[n] = And(ShiftRight<4 * half>(lines[n]), mask);
      }
    });
    Unrolled<MB>([&](auto m) PK_INLINED {
      int32_t four;
      memcpy(&four, x + (half * MB + m) * 4, sizeof(four));
      Unrolled<NB>([&](auto n) PK_INLINED {
        sum[n][m] =
            kNibbles ? DotSmall(sum[n][m], codes[n], four) : DotBytes(sum[n][m], codes[n], four);
      });
    });
  });
}

// The sum of a chunk as a float, from the sums of its digits, the highest first.
template <int D>
PK_INLINE Vec OfDigits(const IVec* sums) {
  Vec value = ToFloat(sums[0]);
  Unrolled<D - 1>([&](auto d) PK_INLINED {
    value = MulAdd(value, Broadcast(256.0f), ToFloat(sums[d + 1]));
  });
  return value;
}

// Activations of D bytes each: integer sums, exact within a chunk.
template <class Format, int MB, int NB, int D>
void CodeTile(const Problem& p, const TileArgs& a) {
  using Sums = Totals<MB, NB, D>;
  const int32_t offset = Format::kStep == 8 ? static_cast<int32_t>(p.offset) : kByteOffset;
  Streams<NB> streams(p, a);
  Sums totals(a);
  const char* x = a.x;
  int64_t row = a.x_row + a.chunk_begin * MB, at = 0;
  for (int64_t chunk = a.chunk_begin; chunk < a.chunk_end; ++chunk, row += MB) {
    IVec sum[NB][MB * D];
    Unrolled<MB * D>([&](auto m) PK_INLINED {
      const IVec first = BroadcastWord(-offset * p.x_code_sum[row * D + m]);
      Unrolled<NB>([&](auto n) PK_INLINED { sum[n][m] = first; });
    });
    const int64_t end = at + ChunkLength(p, chunk) / Format::kStep * 64;
    for (; at < end; at += 64, x += Format::kStep * MB * D) {
      IVec lines[NB];
      const int64_t ahead = streams.Ahead(a, at);
      Unrolled<NB>([&](auto n) PK_INLINED {
        lines[n] = LoadWords(streams.weights[n] + at);
        __builtin_prefetch(streams.weights[n] + ahead, 0, 2);
      });
      AddCodes<Format>(lines, x, sum);
    }
    Sums::Each([&](auto n, auto m) PK_INLINED {
      const Vec value = Mul(OfDigits<D>(&sum[n][m * D]), Broadcast(p.x_scale[row + m]));
      Vec total = MulAdd(value, streams.Read(streams.scales[n]), totals.Get(n, m));
      if (p.minimums) {
        total = MulAdd(streams.Read(streams.minimums[n]), Broadcast(p.x_sum[row + m]), total);
      }
      totals.Set(n, m, total);
    });
    streams.NextChunk();
  }
  totals.Save();
}

#if defined(PK_VARIANT_AVX512BF16)
constexpr bool kHasBfloat16Dot = true;

// Adds the two products of every lane. As an intrinsic it spills: see DotBytes.
PK_INLINE Vec DotOfBfloat16(Vec sum, IVec a, IVec b) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

// Both factors in bfloat16: the processor adds two products at a time.
template <int MB, int NB>
void Bfloat16Tile(const Problem& p, const TileArgs& a) {
  Streams<NB> streams(p, a);
  Totals<MB, NB> totals(a);
  const char* x = a.x;
  int64_t at = 0;
  for (int64_t chunk = a.chunk_begin; chunk < a.chunk_end; ++chunk) {
    Vec sum[NB][MB];
    Totals<MB, NB>::Each([&](auto n, auto m) PK_INLINED { sum[n][m] = Zero(); });
    const int64_t end = at + ChunkLength(p, chunk) / 2 * 64;
    for (; at < end; at += 64, x += 4 * MB) {
      IVec lines[NB];
      const int64_t ahead = streams.Ahead(a, at);
      Unrolled<NB>([&](auto n) PK_INLINED {
        lines[n] = LoadWords(streams.weights[n] + at);
        __builtin_prefetch(streams.weights[n] + ahead, 0, 2);
      });
      Unrolled<MB>([&](auto m) PK_INLINED {
        int32_t pair;
        memcpy(&pair, x + 4 * m, sizeof(pair));
        const IVec factor = BroadcastWord(pair);
        Unrolled<NB>([&](auto n) PK_INLINED {
          sum[n][m] = DotOfBfloat16(sum[n][m], lines[n], factor);
        });
      });
    }
    Totals<MB, NB>::Each([&](auto n, auto m) PK_INLINED {
      totals.Set(n, m, Add(totals.Get(n, m), sum[n][m]));
    });
  }
  totals.Save();
}
#else
constexpr bool kHasBfloat16Dot = false;
#endif

}  // namespace quant_matmul
}  // namespace PK_VARIANT
}  // namespace pk

#endif  // PALLAS_KERNELS_QUANT_MATMUL_CPU_TILES_H_
