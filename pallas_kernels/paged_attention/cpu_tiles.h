// The two products of attention over one tile of keys: scores, and weighted values.
#ifndef PALLAS_KERNELS_PAGED_ATTENTION_CPU_TILES_H_
#define PALLAS_KERNELS_PAGED_ATTENTION_CPU_TILES_H_

#include "pallas_kernels/paged_attention/cpu_problem.h"
#include "pallas_kernels/paged_attention/cpu_vector.h"

namespace pk {
namespace PK_VARIANT {
namespace paged_attention {

using namespace ::pk::paged_attention;

// Where the tile's keys and values stand: one pointer a position, so pages may lie anywhere. Every
// pointer is readable; those of positions outside [begin, end) repeat another.
template <typename Element>
struct Tile {
  int64_t begin, end;
  const Element* keys[kTile];
  const Element* values[kTile];
};

template <typename Element>
PK_INLINE void FillAround(Tile<Element>& tile) {
  for (int64_t k = 0; k < kTile; ++k) {
    if (k >= tile.begin && k < tile.end) continue;
    tile.keys[k] = tile.keys[tile.begin];
    tile.values[k] = tile.values[tile.begin];
  }
}

// Sums that fit the registers: sixteen of 32 with 512 bits, four of 16 / 4 otherwise.
#if defined(PK_SIMD_512)
constexpr int kSumsInRegisters = 16;
constexpr int RowsAtOnce(int rows) { return rows; }
#else
constexpr int kSumsInRegisters = 4;
constexpr int RowsAtOnce(int rows) { return rows % 2 == 0 ? 2 : 1; }
#endif
// Keys, or vectors of columns, that go with so many rows.
constexpr int SumsPerRow(int sums, int rows) { return rows == 3 ? 4 : sums / rows; }

// Adds up Rows x Keys dot products, lane by lane over the width.
template <typename Element, int kRows, int kKeys>
PK_INLINE void AddProducts(const float* q, int64_t width, const Element* const* keys, Vec* sums,
                           int sums_per_row) {
  Vec acc[kRows][kKeys];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) acc[r][k] = Zero();
  }
  for (int64_t w = 0; w < width; w += kLanes) {
    Vec row[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) row[r] = Load(q + r * width + w);
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      const Vec key = LoadElements(keys[k] + w);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[r][k] = MulAdd(row[r], key, acc[r][k]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) sums[r * sums_per_row + k] = acc[r][k];
  }
}

// Scores of kRows queries, `width` floats apart, against as many keys as make sixteen (or 3 x 4).
template <typename Element, int kRows>
PK_INLINE void ScoreKeys(const float* q, int64_t width, const Element* const* keys, Vec scale,
                         float* scores) {
  constexpr int kKeys = SumsPerRow(kLanes, kRows), kRowStep = RowsAtOnce(kRows);
  constexpr int kKeyStep = SumsPerRow(kSumsInRegisters, kRowStep);
  Vec sums[kLanes];
  for (int i = kRows * kKeys; i < kLanes; ++i) sums[i] = Zero();
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r += kRowStep) {
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; k += kKeyStep) {
      AddProducts<Element, kRowStep, kKeyStep>(q + r * width, width, keys + k,
                                               sums + r * kKeys + k, kKeys);
    }
  }
  float all[kLanes];
  Store(all, Mul(SumEach(sums), scale));
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    memcpy(scores + r * kTile, all + r * kKeys, kKeys * sizeof(float));
  }
}

// Asks for a row of elements. A processor does not follow pages by itself: without this, reading
// them and computing with them took turns (float32: 12 instead of 16 GB/s a core, of 23).
template <typename Element>
PK_INLINE void Prefetch(const Element* row, int64_t width) {
  const char* bytes = reinterpret_cast<const char*>(row);
  const int64_t size = width * static_cast<int64_t>(sizeof(Element));
  for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

// Scores of kRows queries against the positions [begin, end) of a tile, and of some around them.
template <typename Element, int kRows>
void Score(const float* q, int64_t width, const Tile<Element>& tile, const Tile<Element>* ahead,
           int64_t begin, int64_t end, float scale, float* scores) {
  constexpr int64_t kKeys = SumsPerRow(kLanes, kRows);
  for (int64_t k = begin / kKeys * kKeys; k < end; k += kKeys) {
    if (ahead) {
      for (int64_t i = k; i < k + kKeys; ++i) Prefetch(ahead->keys[i], width);
    }
    ScoreKeys<Element, kRows>(q, width, tile.keys + k, Broadcast(scale), scores + k);
  }
}

// out = out * kept + weights @ values, for kRows rows and kColumns vectors of columns.
template <typename Element, int kRows, int kColumns>
PK_INLINE void AddColumns(const float* weights, const float* kept, const Tile<Element>& tile,
                          const Tile<Element>* ahead, int64_t begin, int64_t end, int64_t column,
                          float* out, int64_t out_width) {
  Vec acc[kRows][kColumns];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      acc[r][c] = Mul(Load(out + r * out_width + column + c * kLanes), Broadcast(kept[r]));
    }
  }
  for (int64_t k = begin; k < end; ++k) {
    // All strips of columns are asked for along with the first.
    if (ahead && column == 0) Prefetch(ahead->values[k], out_width);
    Vec value[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      value[c] = LoadElements(tile.values[k] + column + c * kLanes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = Broadcast(weights[r * kTile + k]);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) acc[r][c] = MulAdd(weight, value[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) Store(out + r * out_width + column + c * kLanes, acc[r][c]);
  }
}

// Adds the weighted values of a tile's positions [begin, end) to kRows rows.
template <typename Element, int kRows>
void AddValues(const float* weights, const float* kept, const Tile<Element>& tile,
               const Tile<Element>* ahead, int64_t begin, int64_t end, float* out,
               int64_t out_width) {
  constexpr int kRowStep = RowsAtOnce(kRows), kMost = SumsPerRow(kSumsInRegisters, kRowStep);
  constexpr int kColumns = kMost < 8 ? kMost : 8;
  for (int r = 0; r < kRows; r += kRowStep) {
    const float *w = weights + r * kTile, *f = kept + r;
    float* to = out + r * out_width;
    const Tile<Element>* next = r == 0 ? ahead : nullptr;
    int64_t left = out_width / kLanes, column = 0;
    for (; left >= kColumns; left -= kColumns, column += kColumns * kLanes) {
      AddColumns<Element, kRowStep, kColumns>(w, f, tile, next, begin, end, column, to, out_width);
    }
    for (; left >= 2; left -= 2, column += 2 * kLanes) {
      AddColumns<Element, kRowStep, 2>(w, f, tile, next, begin, end, column, to, out_width);
    }
    if (left) AddColumns<Element, kRowStep, 1>(w, f, tile, next, begin, end, column, to, out_width);
  }
}

}  // namespace paged_attention
}  // namespace PK_VARIANT
}  // namespace pk

#endif  // PALLAS_KERNELS_PAGED_ATTENTION_CPU_TILES_H_
