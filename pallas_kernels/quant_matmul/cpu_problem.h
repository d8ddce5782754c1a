// One product y = x @ W as the handler hands it to a variant's loops: plain numbers and pointers.
//
// Packed weights: blocks of 16 columns, each [K / step][16] words of 32 bits, a word holding `step`
// consecutive k of one column. The sum over k is cut into chunks (a quantization group, or 256): a
// chunk is one chain of fused products in ascending k that starts at zero, or an exact sum of
// integers, and the chunks are added in ascending order. Every path keeps to that order, so a result
// depends on its row and column only, not on the number of rows, tiles or threads.
#ifndef PALLAS_KERNELS_QUANT_MATMUL_CPU_PROBLEM_H_
#define PALLAS_KERNELS_QUANT_MATMUL_CPU_PROBLEM_H_

#include <stdint.h>

namespace pk {
namespace quant_matmul {

// The order of FORMATS and ACTIVATIONS in the Python side.
enum Format : int { kFloat32, kBfloat16, kFloat16, kInt8, kInt4, kFloat8 };
enum Activations : int { kExact, kActBfloat16, kActInt8 };

// Row and column widths of the register tiles.
struct TilePlan {
  int64_t rows_per_tile, blocks_per_tile;
  bool direct;  // one row tile: weights are decoded in registers as they stream by
};

struct Problem {
  // What the caller gives.
  const void* x;  // [rows, num_in] float32 or bfloat16
  bool x_is_bfloat16;
  const char* values;
  const char* scales;     // [blocks, groups, 16] of float32 or float16, or null
  const char* minimums;   // as scales, or null
  bool scales_are_half;
  float* y;               // [rows, num_out]
  int64_t rows, num_in, num_out, group;
  Format format;
  Activations activations;

  // What follows from it.
  int64_t blocks;        // ceil(num_out / 16)
  int64_t step;          // k in a word
  int64_t padded_in;     // num_in rounded up to whole words
  int64_t chunk, chunks; // terms of a chain, chains of a sum
  int64_t groups;        // scales of a column
  int64_t block_bytes;
  float offset;          // what an int4 code of zero means, negated
  TilePlan plan;
  int64_t row_tiles;

  // x as the tiles read it: a tile's rows lie side by side, [padded_in][rows of the tile].
  char* packed;
  int64_t packed_tile_bytes;
  float* x_scale;  // [row_tiles][chunks][rows_per_tile]: of int8 rows
  float* x_sum;    // likewise: the sums of a chunk, what a minimum is multiplied with
  int32_t* x_code_sum;  // likewise, one for each digit of x
};

}  // namespace quant_matmul
}  // namespace pk

#endif  // PALLAS_KERNELS_QUANT_MATMUL_CPU_PROBLEM_H_
