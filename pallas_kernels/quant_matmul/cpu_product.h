// One product on any thread pool: fills in a Problem and shares its work out. Free of XLA, so that
// the sanitizers' driver runs the same code.
#ifndef PALLAS_KERNELS_QUANT_MATMUL_CPU_PRODUCT_H_
#define PALLAS_KERNELS_QUANT_MATMUL_CPU_PRODUCT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "pallas_kernels/native/cpu_features.h"
#include "pallas_kernels/native/float_mode.h"
#include "pallas_kernels/native/parallel_for.h"
#include "pallas_kernels/quant_matmul/cpu_problem.h"

namespace pk {

PK_DECLARE_VARIANTS(namespace quant_matmul {
  using namespace ::pk::quant_matmul;
  TilePlan PlanTiles(int64_t rows);
  int64_t PackedBytes(Activations activations);
  void PackTile(const Problem& problem, int64_t tile);
  int64_t ScratchFloats(const Problem& problem, int64_t num_blocks, int64_t num_tiles);
  void Multiply(const Problem& problem, int64_t block_begin, int64_t block_end, int64_t tile_begin,
                int64_t tile_end, float* scratch);
})

namespace quant_matmul {

constexpr int64_t kMaxChunk = 256;
// Below this many bytes of weights a second thread costs more than it brings: it wakes in 3-5 us.
constexpr int64_t kBytesPerChunk = 48 << 10;
constexpr int64_t kRowsPerUnit = 256, kTilesPerUnit = 4;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sets what follows from shapes and format. Returns what is wrong with them, or null.
inline const char* SetFormat(Problem& p, int64_t format, int64_t activations) {
  constexpr int64_t kSteps[] = {1, 2, 2, 4, 8, 4};
  if (format < 0 || format > kFloat8) return "unknown weight format";
  if (activations < 0 || activations > kActInt8) return "unknown activations";
  p.format = static_cast<Format>(format);
  p.activations = static_cast<Activations>(activations);
  const bool has_codes = p.format == kInt8 || p.format == kInt4;
  if (p.activations == kActInt8 && !has_codes) return "int8 activations need int8 or int4 weights";
  if (p.activations == kActBfloat16 && p.format != kBfloat16) {
    return "bfloat16 activations need bfloat16 weights";
  }
  p.step = kSteps[format];
  p.blocks = CeilDiv(p.num_out, 16);
  p.padded_in = CeilDiv(p.num_in, p.step) * p.step;
  p.block_bytes = p.padded_in / p.step * 64;
  p.groups = 1;
  return nullptr;
}

// Sets the chunks of the sum, once the scales are known. Returns what is wrong, or null.
inline const char* SetChunks(Problem& p) {
  const bool is_scaled = p.format >= kInt8;
  if (is_scaled != (p.scales != nullptr) && p.blocks > 0) return "scales go with quantized weights";
  if (p.group < 0 || p.group % 8 || p.group > kMaxChunk) return "a group is a multiple of 8 up to 256";
  if (is_scaled && p.groups != (p.group ? CeilDiv(p.num_in, p.group) : 1)) {
    return "there are not as many scales as groups";
  }
  p.chunk = is_scaled && p.group ? p.group : kMaxChunk;
  p.chunks = CeilDiv(p.padded_in, p.chunk);
  p.offset = p.format == kInt4 && !p.minimums ? 8.0f : 0.0f;
  return nullptr;
}

// Bytes that are not initialised, aligned to a cache line.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(new char[static_cast<size_t>(bytes) + 64]) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.get());
    aligned_ = memory_.get() + (64 - address % 64) % 64;
  }
  template <typename T>
  T* As(int64_t offset_bytes = 0) const {
    return reinterpret_cast<T*>(aligned_ + offset_bytes);
  }

 private:
  std::unique_ptr<char[]> memory_;
  char* aligned_;
};

// Packs x and multiplies, on at most `max_threads` threads of the pool (0: all).
template <typename Pool>
void Run(Pool& pool, Problem p, int variant, int64_t max_threads) {
  if (p.num_in == 0) std::fill_n(p.y, p.rows * p.num_out, 0.0f);
  if (p.rows == 0 || p.num_out == 0 || p.num_in == 0) return;
  p.plan = PK_PICK(quant_matmul::PlanTiles, variant)(p.rows);
  p.row_tiles = CeilDiv(p.rows, p.plan.rows_per_tile);
  p.packed_tile_bytes = p.plan.rows_per_tile * p.padded_in *
                        PK_PICK(quant_matmul::PackedBytes, variant)(p.activations);
  const int64_t packed_bytes = CeilDiv(p.row_tiles * p.packed_tile_bytes, 64) * 64;
  const int64_t numbers = p.row_tiles * p.chunks * p.plan.rows_per_tile;
  const Scratch packed(packed_bytes + 3 * numbers * 4);
  p.packed = packed.As<char>();
  p.x_scale = packed.As<float>(packed_bytes);
  p.x_sum = packed.As<float>(packed_bytes + numbers * 4);
  p.x_code_sum = packed.As<int32_t>(packed_bytes + 2 * numbers * 4);

  auto* pack = PK_PICK(quant_matmul::PackTile, variant);
  const int64_t pack_threads = p.rows * p.num_in < (1 << 17) ? 1 : max_threads;
  const auto pack_tile = [&](int64_t tile) {
    const ScopedFloatMode mode;
    pack(p, tile);
  };
  ParallelFor(pool, p.row_tiles, pack_tile, pack_threads);

  // A unit is some columns by some rows; which unit an output lies in cannot change its bits.
  const int64_t threads = max_threads > 0 ? max_threads : std::max<int64_t>(1, pool.num_threads());
  const int64_t column_tiles = CeilDiv(p.blocks, p.plan.blocks_per_tile);
  const int64_t row_units = CeilDiv(p.rows, kRowsPerUnit);
  int64_t column_units = CeilDiv(column_tiles, kTilesPerUnit);
  if (p.plan.direct) {
    const int64_t worth = 1 + p.blocks * p.block_bytes / kBytesPerChunk;
    column_units = std::min({column_tiles, 4 * threads, worth});
  } else if (column_units * row_units < 4 * threads) {
    column_units = std::min(column_tiles, CeilDiv(4 * threads, row_units));
  }
  auto* multiply = PK_PICK(quant_matmul::Multiply, variant);
  auto* scratch_floats = PK_PICK(quant_matmul::ScratchFloats, variant);
  const auto run_unit = [&](int64_t unit) {
    const ScopedFloatMode mode;
    const int64_t column = unit / row_units, row = unit % row_units;
    const int64_t begin = column_tiles * column / column_units * p.plan.blocks_per_tile;
    const int64_t after = column_tiles * (column + 1) / column_units * p.plan.blocks_per_tile;
    const int64_t end = std::min(p.blocks, after);
    const int64_t tile_begin = p.row_tiles * row / row_units;
    const int64_t tile_end = p.row_tiles * (row + 1) / row_units;
    const Scratch scratch(4 * scratch_floats(p, end - begin, tile_end - tile_begin));
    multiply(p, begin, end, tile_begin, tile_end, scratch.As<float>());
  };
  ParallelFor(pool, column_units * row_units, run_unit, max_threads);
}

}  // namespace quant_matmul
}  // namespace pk

#endif  // PALLAS_KERNELS_QUANT_MATMUL_CPU_PRODUCT_H_
