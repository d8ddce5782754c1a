// The loops of the product with packed weights, in one variant; cpu_problem.h fixes their order.
//
// A tile is rows x blocks of sums held in registers, over a panel of chunks. With few rows ("direct")
// a panel is all of K, and weights are decoded as they stream by. With many, the panel of a column
// tile is decoded once into a buffer that stays in cache, and every row tile runs over it.
#include "pallas_kernels/quant_matmul/cpu_formats.h"
#include "pallas_kernels/quant_matmul/cpu_problem.h"

namespace pk {
namespace PK_VARIANT {
namespace quant_matmul {

#if defined(PK_SIMD_512)
constexpr int kRows = 8, kBlocks = 3;  // 24 of 32 registers hold sums
constexpr int DirectBlocks(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 3 : 2; }
#elif defined(PK_SIMD_256)
constexpr int kRows = 6, kBlocks = 1;  // 12 of 16
constexpr int DirectBlocks(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#else
constexpr int kRows = 4, kBlocks = 1;
constexpr int DirectBlocks(int rows) { return rows == 1 ? 2 : 1; }
#endif

constexpr int64_t kPrefetchBytes = 1536;  // ahead, in each of a tile's streams
constexpr int64_t kPanelBytes = 48 << 10; // of a column tile's weights as the tiles read them

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
  int64_t scale_step;
  bool are_half;

  Streams(const Problem& p, const TileArgs& a) : are_half(p.scales_are_half) {
    const int64_t bytes = kLanes * (are_half ? 2 : 4);
    scale_step = p.groups == 1 ? 0 : bytes;
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
      if (scales[n]) scales[n] += scale_step;
      if (minimums[n]) minimums[n] += scale_step;
    }
  }
};

// The sums of finished chunks. A few stay in registers; many would crowd out the chunk's own sums,
// and lie in memory, where each is touched once a chunk.
template <int MB, int NB>
struct Totals {
  static constexpr bool kInMemory = MB * NB > 8;
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
      Vec scale = streams.Read(streams.scales[n]);
      if (Format::kFactor != 1.0f) scale = Mul(scale, Broadcast(Format::kFactor));
      Vec total = MulAdd(sum[n][m], scale, totals.Get(n, m));
      if (p.minimums) total = MulAdd(streams.Read(streams.minimums[n]), Broadcast(x_sum[m]), total);
      totals.Set(n, m, total);
    });
    streams.NextChunk();
  }
  totals.Save();
}

template <class Format, int MB, int NB>
PK_INLINE void AddCodes(const Problem& p, const IVec (&lines)[NB], const char* x,
                        IVec (&sum)[NB][MB]) {
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

// Activations rounded to eight bits: integer sums, exact within a chunk.
template <class Format, int MB, int NB>
void CodeTile(const Problem& p, const TileArgs& a) {
  const int32_t offset = Format::kStep == 8 ? static_cast<int32_t>(p.offset) : kByteOffset;
  Streams<NB> streams(p, a);
  Totals<MB, NB> totals(a);
  const char* x = a.x;
  int64_t row = a.x_row + a.chunk_begin * MB, at = 0;
  for (int64_t chunk = a.chunk_begin; chunk < a.chunk_end; ++chunk, row += MB) {
    IVec sum[NB][MB];
    Totals<MB, NB>::Each([&](auto n, auto m) PK_INLINED {
      sum[n][m] = BroadcastWord(-offset * p.x_code_sum[row + m]);
    });
    const int64_t end = at + ChunkLength(p, chunk) / Format::kStep * 64;
    for (; at < end; at += 64, x += Format::kStep * MB) {
      IVec lines[NB];
      const int64_t ahead = streams.Ahead(a, at);
      Unrolled<NB>([&](auto n) PK_INLINED {
        lines[n] = LoadWords(streams.weights[n] + at);
        __builtin_prefetch(streams.weights[n] + ahead, 0, 2);
      });
      AddCodes<Format, MB, NB>(p, lines, x, sum);
    }
    Totals<MB, NB>::Each([&](auto n, auto m) PK_INLINED {
      const Vec scale = Mul(streams.Read(streams.scales[n]), Broadcast(p.x_scale[row + m]));
      Vec total = MulAdd(ToFloat(sum[n][m]), scale, totals.Get(n, m));
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

// ---- which tile, and over what -------------------------------------------------------------------

using TileFunction = void (*)(const Problem&, const TileArgs&);

template <int MB, int NB>
TileFunction DirectTile(const Problem& p) {
  if (p.activations == kActInt8) {
    return p.format == kInt4 ? &CodeTile<Int4, MB, NB> : &CodeTile<Int8, MB, NB>;
  }
#if defined(PK_VARIANT_AVX512BF16)
  if (p.activations == kActBfloat16) return &Bfloat16Tile<MB, NB>;
#endif
  switch (p.format) {
    case kFloat32:
      return &FloatTile<Float32, MB, NB>;
    case kBfloat16:
      return &FloatTile<Bfloat16, MB, NB>;
    case kFloat16:
      return &FloatTile<Float16, MB, NB>;
    case kInt8:
      return &FloatTile<Int8, MB, NB>;
    case kInt4:
      return &FloatTile<Int4, MB, NB>;
    default:
      return &FloatTile<Float8, MB, NB>;
  }
}

template <int MB>
TileFunction BlockedTile(const Problem& p) {
  if (p.activations == kActInt8) {
    return p.format == kInt4 ? &CodeTile<Int4, MB, kBlocks> : &CodeTile<Int8, MB, kBlocks>;
  }
#if defined(PK_VARIANT_AVX512BF16)
  if (p.activations == kActBfloat16) return &Bfloat16Tile<MB, kBlocks>;
#endif
  return &FloatTile<Float32, MB, kBlocks>;
}

// Whether tiles read floats that Decode has written, instead of the packed weights.
bool IsDecoded(const Problem& p) {
  const bool dot = p.activations == kActInt8 || (p.activations == kActBfloat16 && kHasBfloat16Dot);
  return !p.plan.direct && p.format != kFloat32 && !dot;
}

int64_t TileRows(const Problem& p, int64_t tile) {
  const int64_t rest = p.rows - tile * p.plan.rows_per_tile;
  return p.plan.direct || rest > 4 ? p.plan.rows_per_tile : Min(4, p.plan.rows_per_tile);
}

TileFunction PickTile(const Problem& p, int64_t tile) {
  const int64_t rows = TileRows(p, tile);
  if (!p.plan.direct) return rows == 4 ? BlockedTile<4>(p) : BlockedTile<kRows>(p);
  switch (rows) {
    case 1:
      return DirectTile<1, DirectBlocks(1)>(p);
    case 2:
      return DirectTile<2, DirectBlocks(2)>(p);
    case 4:
      return DirectTile<4, DirectBlocks(4)>(p);
#if defined(PK_SIMD_512)
    case 6:
      return DirectTile<6, DirectBlocks(6)>(p);
#endif
    default:
      return DirectTile<kRows, DirectBlocks(kRows)>(p);
  }
}

TilePlan PlanTiles(int64_t rows) {
  if (rows > kRows) return {kRows, kBlocks, false};
  const int64_t tile = rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : rows <= 6 ? 6 : kRows;
  return {tile, DirectBlocks(static_cast<int>(tile)), true};
}

template <class Format, int J = 0>
PK_INLINE void DecodeLine(const Format& format, typename Format::Line line, float* to) {
  Vec value = format.template Get<J>(line);
  if (Format::kFactor != 1.0f) value = Mul(value, Broadcast(Format::kFactor));
  Store(to + J * kLanes, value);
  if constexpr (J + 1 < Format::kStep) DecodeLine<Format, J + 1>(format, line, to);
}

template <class Format>
void DecodeLines(const Problem& p, const char* from, int64_t num_in, float* to) {
  const Format format(p.offset);
  for (int64_t k = 0; k < num_in; k += Format::kStep, from += 64, to += Format::kStep * kLanes) {
    __builtin_prefetch(from + kPrefetchBytes);
    DecodeLine(format, format.LoadLine(from), to);
  }
}

void Decode(const Problem& p, const char* from, int64_t num_in, float* to) {
  switch (p.format) {
    case kBfloat16:
      return DecodeLines<Bfloat16>(p, from, num_in, to);
    case kFloat16:
      return DecodeLines<Float16>(p, from, num_in, to);
    case kInt8:
      return DecodeLines<Int8>(p, from, num_in, to);
    case kInt4:
      return DecodeLines<Int4>(p, from, num_in, to);
    default:
      return DecodeLines<Float8>(p, from, num_in, to);
  }
}

int64_t PanelChunks(const Problem& p) {
  if (p.plan.direct) return p.chunks;
  const int64_t bytes_per_in = IsDecoded(p) ? 64 : 64 / p.step;
  const int64_t chunks = kPanelBytes / (bytes_per_in * p.chunk * p.plan.blocks_per_tile);
  return chunks < 1 ? 1 : chunks;
}

int64_t DecodedFloats(const Problem& p) {
  return IsDecoded(p) ? PanelChunks(p) * p.chunk * p.plan.blocks_per_tile * kLanes : 0;
}

// Floats of scratch that Multiply needs for so many columns and rows.
int64_t ScratchFloats(const Problem& p, int64_t num_blocks, int64_t num_tiles) {
  const int64_t column_tiles = (num_blocks + p.plan.blocks_per_tile - 1) / p.plan.blocks_per_tile;
  const int64_t tile_floats = p.plan.rows_per_tile * p.plan.blocks_per_tile * kLanes;
  return DecodedFloats(p) + column_tiles * num_tiles * tile_floats;
}

void StoreTile(const Problem& p, int64_t tile, int64_t first_block, const float* totals) {
  const int64_t row = tile * p.plan.rows_per_tile;
  const int64_t num_rows = Min(p.rows - row, TileRows(p, tile));
  const int64_t column = first_block * kLanes, width = p.plan.blocks_per_tile * kLanes;
  for (int64_t m = 0; m < num_rows; ++m) {
    memcpy(p.y + (row + m) * p.num_out + column, totals + m * width,
           sizeof(float) * static_cast<size_t>(Min(width, p.num_out - column)));
  }
}

// One panel of one column tile, for all row tiles of a unit.
void MultiplyPanel(const Problem& p, int64_t first_block, int64_t end_block, int64_t chunk,
                   int64_t tile_begin, int64_t tile_end, float* decoded, float* totals) {
  const int64_t k = chunk * p.chunk, chunk_end = Min(p.chunks, chunk + PanelChunks(p));
  const int64_t num_in = Min(p.padded_in, chunk_end * p.chunk) - k;
  const int64_t blocks = p.plan.blocks_per_tile;
  TileArgs a;
  a.first_block = first_block;
  a.valid_blocks = Min(blocks, end_block - first_block);
  a.block_stride = p.block_bytes;
  a.weights = p.values + first_block * p.block_bytes + k / p.step * 64;
  a.limit = p.plan.direct ? p.block_bytes : INT64_MAX;
  a.jump = (blocks - 1) * p.block_bytes;
  if (IsDecoded(p)) {
    for (int64_t n = 0; n < a.valid_blocks; ++n) {
      Decode(p, a.weights + n * p.block_bytes, num_in, decoded + n * num_in * kLanes);
    }
    a.weights = reinterpret_cast<const char*>(decoded);
    a.block_stride = num_in * kLanes * static_cast<int64_t>(sizeof(float));
  }
  a.chunk_begin = chunk;
  a.chunk_end = chunk_end;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t x_bytes = p.packed_tile_bytes / p.plan.rows_per_tile * TileRows(p, tile);
    a.x = p.packed + tile * p.packed_tile_bytes + x_bytes / p.padded_in * k;
    a.x_row = tile * p.chunks * p.plan.rows_per_tile;
    a.totals = totals + (tile - tile_begin) * p.plan.rows_per_tile * blocks * kLanes;
    PickTile(p, tile)(p, a);
  }
}

// Multiplies the row tiles [tile_begin, tile_end) with the column blocks [block_begin, block_end).
void Multiply(const Problem& p, int64_t block_begin, int64_t block_end, int64_t tile_begin,
              int64_t tile_end, float* scratch) {
  const int64_t width = p.plan.blocks_per_tile;
  const int64_t tile_floats = p.plan.rows_per_tile * width * kLanes;
  const int64_t tiles = tile_end - tile_begin, panel = PanelChunks(p);
  float* const all_totals = scratch + DecodedFloats(p);
  for (int64_t chunk = 0; chunk < p.chunks; chunk += panel) {
    float* totals = all_totals;
    for (int64_t block = block_begin; block < block_end; block += width) {
      MultiplyPanel(p, block, block_end, chunk, tile_begin, tile_end, scratch, totals);
      totals += tiles * tile_floats;
    }
  }
  float* totals = all_totals;
  for (int64_t block = block_begin; block < block_end; block += width) {
    for (int64_t tile = tile_begin; tile < tile_end; ++tile, totals += tile_floats) {
      StoreTile(p, tile, block, totals);
    }
  }
}

// ---- packing x -----------------------------------------------------------------------------------

// Bytes of one packed element of x.
int64_t PackedBytes(Activations activations) {
  if (activations == kActInt8) return 1;
  return activations == kActBfloat16 && kHasBfloat16Dot ? 2 : 4;
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

constexpr int64_t kMaxChunk = 256;

// Writes one chunk of one row between the tile's other rows.
void PackChunk(const Problem& p, const float* values, int64_t count, int64_t rows, int64_t row,
               int64_t index, char* to) {
  if (p.activations == kActInt8) {
    int8_t codes[kMaxChunk];
    p.x_scale[index] = QuantizeChunk(values, count, codes, &p.x_code_sum[index]);
    p.x_sum[index] = p.x_scale[index] * static_cast<float>(p.x_code_sum[index]);
    for (int64_t k = 0; k < count; k += 4) memcpy(to + (k * rows + 4 * row), codes + k, 4);
    return;
  }
  if (p.minimums) p.x_sum[index] = SumOf(values, count);
  if (p.activations == kActBfloat16 && kHasBfloat16Dot) {
    uint16_t* halves = reinterpret_cast<uint16_t*>(to);
    for (int64_t k = 0; k < count; ++k) {
      halves[(k / 2 * rows + row) * 2 + k % 2] = ToBfloat16(values[k]);
    }
    return;
  }
  float* floats = reinterpret_cast<float*>(to);
  const bool round = p.activations == kActBfloat16;
  for (int64_t k = 0; k < count; ++k) {
    floats[k * rows + row] = round ? FromBfloat16(ToBfloat16(values[k])) : values[k];
  }
}

// Packs the rows of one tile; rows beyond the last are zero.
void PackTile(const Problem& p, int64_t tile) {
  const int64_t rows = TileRows(p, tile), first = tile * p.plan.rows_per_tile;
  const int64_t element = PackedBytes(p.activations);
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
