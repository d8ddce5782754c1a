// Products of row tiles with matrices of a stack, on any thread pool. Free of XLA, so that the
// sanitizers' driver runs the same code.
//
// Neighbouring tiles of one matrix whose rows follow on each other are one product; the units of all
// products are shared out together, so a step of one row and eight experts keeps every thread busy.
#ifndef PALLAS_KERNELS_GROUPED_MATMUL_CPU_GROUPS_H_
#define PALLAS_KERNELS_GROUPED_MATMUL_CPU_GROUPS_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "pallas_kernels/native/parallel_for.h"
#include "pallas_kernels/quant_matmul/cpu_product.h"

namespace pk {
namespace grouped_matmul {

using quant_matmul::Problem;
using quant_matmul::Product;

struct Tiles {
  Problem first;              // with the first matrix of the stack; its rows are not set
  int64_t num_tiles, height;  // x is [num_tiles, height, num_in]
  int64_t num_matrices;       // at least one
  const int32_t* groups;      // [num_tiles]: the matrix of each tile
  const int32_t* rows;        // [num_tiles]: rows in use; those behind them come out as zeros
};

inline int64_t RowsOf(const Tiles& t, int64_t tile) {
  return std::clamp<int64_t>(t.rows[tile], 0, t.height);
}

// An index outside the stack means its first or last matrix, as in XLA.
inline int64_t MatrixOf(const Tiles& t, int64_t tile) {
  return std::clamp<int64_t>(t.groups[tile], 0, t.num_matrices - 1);
}

// The product of `rows` rows, from the first of a tile on, with the tile's matrix.
inline Problem ProblemOf(const Tiles& t, int64_t tile, int64_t rows) {
  Problem p = t.first;
  const int64_t matrix = MatrixOf(t, tile), row = tile * t.height;
  const int64_t scale_bytes = matrix * p.blocks * p.groups * 16 * (p.scales_are_half ? 2 : 4);
  p.values += matrix * p.blocks * p.block_bytes;
  if (p.scales) p.scales += scale_bytes;
  if (p.minimums) p.minimums += scale_bytes;
  p.x = static_cast<const char*>(p.x) + row * p.num_in * (p.x_is_bfloat16 ? 2 : 4);
  p.y += row * p.num_out;
  p.rows = rows;
  return p;
}

// Where in a list of work the units of each product begin.
class Offsets {
 public:
  void Add(int64_t count) { ends_.push_back(total() + count); }
  int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }
  // The product that a unit belongs to, and the unit's number in it.
  std::pair<size_t, int64_t> Find(int64_t unit) const {
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), unit);
    const int64_t begin = end == ends_.begin() ? 0 : end[-1];
    return {static_cast<size_t>(end - ends_.begin()), unit - begin};
  }

 private:
  std::vector<int64_t> ends_;
};

inline void ZeroDeadRows(const Tiles& t, int64_t tile) {
  const int64_t rows = RowsOf(t, tile), columns = t.first.num_out;
  float* const from = t.first.y + (tile * t.height + rows) * columns;
  std::fill_n(from, (t.height - rows) * columns, 0.0f);
}

// Multiplies the rows in use, on at most `max_threads` threads of the pool (0: all).
template <typename Pool>
void Run(Pool& pool, const Tiles& t, int variant, int64_t max_threads) {
  std::vector<Product> products;
  Offsets packs, units;
  bool is_wide = false;
  for (int64_t tile = 0, next; tile < t.num_tiles; tile = next) {
    int64_t rows = RowsOf(t, tile);
    for (next = tile + 1; next < t.num_tiles && rows == (next - tile) * t.height; ++next) {
      if (MatrixOf(t, next) != MatrixOf(t, tile)) break;
      rows += RowsOf(t, next);
    }
    if (rows == 0) continue;
    products.emplace_back(ProblemOf(t, tile, rows), variant, max_threads, pool.num_threads());
    packs.Add(products.back().num_tiles());
    units.Add(products.back().num_units());
    is_wide |= products.back().is_wide();
  }
  const int64_t pack_threads = is_wide ? max_threads : 1;
  ParallelFor(pool, t.num_tiles, [&](int64_t tile) { ZeroDeadRows(t, tile); }, pack_threads);
  const auto pack = [&](int64_t unit) {
    const auto [product, tile] = packs.Find(unit);
    products[product].Pack(tile);
  };
  ParallelFor(pool, packs.total(), pack, pack_threads);
  const auto multiply = [&](int64_t unit) {
    const auto [product, part] = units.Find(unit);
    products[product].Multiply(part);
  };
  ParallelFor(pool, units.total(), multiply, max_threads);
}

}  // namespace grouped_matmul
}  // namespace pk

#endif  // PALLAS_KERNELS_GROUPED_MATMUL_CPU_GROUPS_H_
