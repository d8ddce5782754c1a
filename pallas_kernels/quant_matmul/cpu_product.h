// One product on any thread pool: fills in a Problem and shares its work out. Free of XLA, so that
// the sanitizers' driver runs the same code.
#ifndef PALLAS_KERNELS_QUANT_MATMUL_CPU_PRODUCT_H_
#define PALLAS_KERNELS_QUANT_MATMUL_CPU_PRODUCT_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>

#include "pallas_kernels/native/cpu_features.h"
#include "pallas_kernels/native/float_mode.h"
#include "pallas_kernels/native/parallel_for.h"
#include "pallas_kernels/native/read_ahead.h"
#include "pallas_kernels/quant_matmul/cpu_problem.h"

namespace pk {

PK_DECLARE_VARIANTS(namespace quant_matmul {
  using namespace ::pk::quant_matmul;
  TilePlan PlanTiles(const Problem& problem);
  int64_t PackedBytes(const Problem& problem);
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

// Bytes that are not initialised, aligned to a cache line. A thread keeps two blocks for its next
// products: the allocator takes as long as a small operation does.
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(int64_t bytes) {
    const int64_t size = bytes + 64;
    for (Block& spare : Spares()) {
      if (spare.size < size) continue;
      std::swap(block_, spare);
      return;
    }
    block_ = {std::unique_ptr<char[]>(new char[static_cast<size_t>(size)]), size};
  }
  ~Scratch() {
    if (block_.size > kMostSpare) return;
    for (Block& spare : Spares()) {
      if (block_.size > spare.size) std::swap(block_, spare);
    }
  }
  Scratch(Scratch&& other) noexcept { std::swap(block_, other.block_); }
  Scratch& operator=(Scratch&& other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  template <typename T>
  T* As(int64_t offset_bytes = 0) const {
    const uintptr_t address = reinterpret_cast<uintptr_t>(block_.memory.get());
    return reinterpret_cast<T*>(block_.memory.get() + (64 - address % 64) % 64 + offset_bytes);
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int64_t kMostSpare = 0;  // blocks of exactly their size, to find what lies beyond
#else
  static constexpr int64_t kMostSpare = 2 << 20;
#endif
  struct Block {
    std::unique_ptr<char[]> memory;
    int64_t size = 0;
  };
  static std::array<Block, 2>& Spares() {
    thread_local std::array<Block, 2> spares;
    return spares;
  }
  Block block_;
};

// One product, cut into units that threads run in any order: first all of Pack, then all of Multiply.
class Product {
 public:
  // At most `max_threads` of the pool's `pool_threads` will share it (0: all).
  Product(const Problem& problem, int variant, int64_t max_threads, int64_t pool_threads)
      : p_(problem), variant_(variant) {
    if (p_.num_in == 0) std::fill_n(p_.y, p_.rows * p_.num_out, 0.0f);
    if (p_.rows == 0 || p_.num_out == 0 || p_.num_in == 0) return;
    p_.plan = PK_PICK(quant_matmul::PlanTiles, variant)(p_);
    p_.row_tiles = CeilDiv(p_.rows, p_.plan.rows_per_tile);
    Allocate();
    CutIntoUnits(max_threads > 0 ? max_threads : std::max<int64_t>(1, pool_threads));
  }

  int64_t num_tiles() const { return p_.row_tiles; }
  int64_t num_units() const { return column_units_ * row_units_; }
  // Whether packing x is worth a second thread.
  bool is_wide() const { return p_.rows * p_.num_in >= 1 << 17; }

  // Tells helpers what is read, once, so that next time they begin before they are asked to.
  void AnnounceReading() const {
    if (!p_.plan.direct) return Announce({});
    const int64_t shared = p_.scales ? p_.blocks * p_.groups * (p_.scales_are_half ? 32 : 64) : 0;
    Announce({{p_.values, p_.blocks * p_.block_bytes},
              {p_.scales, shared},
              {p_.minimums, p_.minimums ? shared : 0}});
  }

  void Pack(int64_t tile) const {
    const ScopedFloatMode mode;
    PK_PICK(quant_matmul::PackTile, variant_)(p_, tile);
  }

  // A unit is some columns by some rows; which unit an output lies in cannot change its bits.
  void Multiply(int64_t unit) const {
    const ScopedFloatMode mode;
    const int64_t column = unit / row_units_, row = unit % row_units_;
    const int64_t begin = column_tiles_ * column / column_units_ * p_.plan.blocks_per_tile;
    const int64_t after = column_tiles_ * (column + 1) / column_units_ * p_.plan.blocks_per_tile;
    const int64_t end = std::min(p_.blocks, after);
    const int64_t tile_begin = p_.row_tiles * row / row_units_;
    const int64_t tile_end = p_.row_tiles * (row + 1) / row_units_;
    auto* scratch_floats = PK_PICK(quant_matmul::ScratchFloats, variant_);
    const Scratch scratch(4 * scratch_floats(p_, end - begin, tile_end - tile_begin));
    auto* multiply = PK_PICK(quant_matmul::Multiply, variant_);
    multiply(p_, begin, end, tile_begin, tile_end, scratch.As<float>());
  }

 private:
  void Allocate() {
    p_.packed_tile_bytes = p_.plan.rows_per_tile * p_.padded_in *
                           PK_PICK(quant_matmul::PackedBytes, variant_)(p_);
    const int64_t packed_bytes = CeilDiv(p_.row_tiles * p_.packed_tile_bytes, 64) * 64;
    const int64_t numbers = p_.row_tiles * p_.chunks * p_.plan.rows_per_tile;
    packed_ = Scratch(packed_bytes + 5 * numbers * 4);  // three sums of codes
    p_.packed = packed_.As<char>();
    p_.x_scale = packed_.As<float>(packed_bytes);
    p_.x_sum = packed_.As<float>(packed_bytes + numbers * 4);
    p_.x_code_sum = packed_.As<int32_t>(packed_bytes + 2 * numbers * 4);
  }

  void CutIntoUnits(int64_t threads) {
    column_tiles_ = CeilDiv(p_.blocks, p_.plan.blocks_per_tile);
    row_units_ = CeilDiv(p_.rows, kRowsPerUnit);
    column_units_ = CeilDiv(column_tiles_, kTilesPerUnit);
    if (p_.plan.direct) {
      const int64_t worth = 1 + p_.blocks * p_.block_bytes / kBytesPerChunk;
      column_units_ = std::min({column_tiles_, 4 * threads, worth});
    } else if (column_units_ * row_units_ < 4 * threads) {
      column_units_ = std::min(column_tiles_, CeilDiv(4 * threads, row_units_));
    }
  }

  Problem p_;
  int variant_;
  Scratch packed_;
  int64_t column_tiles_ = 0, column_units_ = 0, row_units_ = 0;
};

// Packs x and multiplies, on at most `max_threads` threads of the pool (0: all).
template <typename Pool>
void Run(Pool& pool, const Problem& problem, int variant, int64_t max_threads) {
  const Product product(problem, variant, max_threads, pool.num_threads());
  product.AnnounceReading();
  const int64_t pack_threads = product.is_wide() ? max_threads : 1;
  ParallelFor(pool, product.num_tiles(), [&](int64_t tile) { product.Pack(tile); }, pack_threads);
  ParallelFor(pool, product.num_units(), [&](int64_t unit) { product.Multiply(unit); }, max_threads);
}

}  // namespace quant_matmul
}  // namespace pk

#endif  // PALLAS_KERNELS_QUANT_MATMUL_CPU_PRODUCT_H_
