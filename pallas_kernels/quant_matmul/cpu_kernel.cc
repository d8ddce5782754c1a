// The loops of the product with packed weights, in one variant; cpu_problem.h fixes their order.
//
// A tile is rows x blocks of sums held in registers, over a panel of chunks. With few rows ("direct")
// a panel is all of K, and weights are decoded as they stream by. With many, the panel of a column
// tile is decoded once into a buffer that stays in cache, and every row tile runs over it.
#include "pallas_kernels/quant_matmul/cpu_pack.h"
#include "pallas_kernels/quant_matmul/cpu_problem.h"
#include "pallas_kernels/quant_matmul/cpu_tiles.h"

namespace pk {
namespace PK_VARIANT {
namespace quant_matmul {

#if defined(PK_SIMD_512)
constexpr int kRows = 8, kBlocks = 3;  // 24 of 32 registers hold sums
constexpr int DirectBlocks(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 3 : 2; }
#elif defined(PK_SIMD_256)
constexpr int kRows = 6, kBlocks = 1;  // 12 of 16
constexpr int DirectBlocks(int rows) { return rows <= 2 ? 2 : 1; }
#else
constexpr int kRows = 4, kBlocks = 1;
constexpr int DirectBlocks(int rows) { return rows == 1 ? 2 : 1; }
#endif
// Three sums for every row and block.
constexpr int SplitBlocks(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }

constexpr int64_t kPanelBytes = 48 << 10; // of a column tile's weights as the tiles read them

// ---- which tile, and over what -------------------------------------------------------------------

using TileFunction = void (*)(const Problem&, const TileArgs&);

template <int MB, int NB, int D>
TileFunction TileOfCodes(const Problem& p) {
  return p.format == kInt4 ? &CodeTile<Int4, MB, NB, D> : &CodeTile<Int8, MB, NB, D>;
}

// Tiles that need no decoded weights, SB blocks wide where x is split; or null.
template <int MB, int NB, int SB>
TileFunction IntegerTile(const Problem& p) {
  if (Digits(p) == 1) return TileOfCodes<MB, NB, 1>(p);
  if constexpr (kSplitsFloats) {
    if (Digits(p) == 3) return TileOfCodes<MB, SB, 3>(p);
  }
#if defined(PK_VARIANT_AVX512BF16)
  if (p.activations == kActBfloat16) return &Bfloat16Tile<MB, NB>;
#endif
  return nullptr;
}

template <int MB, int NB>
TileFunction DirectTile(const Problem& p) {
  if (const TileFunction tile = IntegerTile<MB, NB, SplitBlocks(MB)>(p)) return tile;
  switch (p.format) {
    case kFloat32:
      return &FloatTile<Float32, MB, NB>;
    case kBfloat16:
      return &FloatTile<Bfloat16, MB, NB>;
    case kFloat16:
      return &FloatTile<Float16, MB, NB>;
    case kFloat8:
      return &FloatTile<Float8, MB, NB>;
    default:
      if constexpr (kSplitsFloats) return nullptr;
      return p.format == kInt8 ? &FloatTile<Int8, MB, NB> : &FloatTile<Int4, MB, NB>;
  }
}

template <int MB>
TileFunction BlockedTile(const Problem& p) {
  const TileFunction tile = IntegerTile<MB, kBlocks, SplitBlocks(kRows)>(p);
  return tile ? tile : &FloatTile<Float32, MB, kBlocks>;
}

// Whether tiles read floats that Decode has written, instead of the packed weights.
bool IsDecoded(const Problem& p) {
  const bool dot = Digits(p) > 0 || (p.activations == kActBfloat16 && kHasBfloat16Dot);
  return !p.plan.direct && p.format != kFloat32 && !dot;
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

TilePlan PlanTiles(const Problem& p) {
  const int64_t rows = p.rows;
  const bool direct = rows <= kRows;
  const int tile = rows > 6 ? kRows : rows > 4 ? 6 : rows > 2 ? 4 : static_cast<int>(rows);
  const int height = direct && tile < kRows ? tile : kRows;
  const int width = direct ? DirectBlocks(height) : kBlocks;
  return {height, Digits(p) == 3 ? SplitBlocks(height) : width, direct};
}

template <class Format, int J = 0>
PK_INLINE void DecodeLine(const Format& format, typename Format::Line line, float* to) {
  Store(to + J * kLanes, format.template Get<J>(line));
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

}  // namespace quant_matmul
}  // namespace PK_VARIANT
}  // namespace pk
