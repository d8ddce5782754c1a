// Paged attention as the handler hands it to a variant's loops: plain numbers and pointers.
//
// What a query's result is made of depends on the query alone. Its keys are cut at absolute
// positions: into tiles of 64, whose scores share one step of an online softmax, and into spans of
// four tiles, each summed from nothing and merged in ascending order. A tile or span that a query
// does not see leaves its sums as they are, bit for bit. So nothing else has a say: not the batch,
// nor how many queries a call brings, where pages lie or how large they are, nor how many threads
// take spans.
#ifndef PALLAS_KERNELS_PAGED_ATTENTION_CPU_PROBLEM_H_
#define PALLAS_KERNELS_PAGED_ATTENTION_CPU_PROBLEM_H_

#include <stdint.h>

namespace pk {
namespace paged_attention {

constexpr int64_t kTile = 64;   // positions of a softmax step
constexpr int64_t kSpan = 256;  // positions summed by themselves
constexpr int64_t kMaxRows = 64;  // queries that share one reading of their keys

// Codes come with factors: int8, and the bytes of float8_e4m3fn, which are finite.
enum class Type : int { kFloat32, kBfloat16, kFloat16, kInt8, kFloat8 };

struct Problem {
  const void* q;  // [B, T, K, G, W] float32 or bfloat16
  void* out;      // [B, T, K, G, Hv], as q
  Type q_type;
  const void* pool;  // [L, P, K, C, S, W]
  Type pool_type;
  // [L, P, K, 2, S] bfloat16: what codes are multiplied with, or null. Keys and values have one
  // each; of a latent, a pool with one plane, the value columns and the rest.
  const uint16_t* factors;
  const int32_t* layers;     // [B]
  const int32_t* table;      // [B, M]
  const int32_t* positions;  // [B, T]
  const int32_t* lengths;    // [B]
  const float* sinks;        // [B or 1, K, G] or null
  int64_t sink_stride;       // floats between the sinks of two rows: 0 when rows share them
  int64_t batch, tokens, heads, group, width;
  int64_t layers_in_pool, pages, planes, page_size;
  int64_t table_width, value_dim;
  int64_t window;  // positions a query sees; 2^32 and more: all
  float scale, softcap;  // softcap 0: none
  bool turned;  // whether the pool's keys are turned: queries are too, before they meet them
};

// Queries of one sequence and key head that are computed together: rows [first_row, first_row +
// rows) of its live queries, which are counted token by token and, within a token, by q head.
struct Unit {
  int64_t sequence, head, first_row, rows;
  const int32_t* live_tokens;    // indices of tokens whose queries see something
  int64_t begin, end;            // all positions that the unit's queries see
};

// Static, like all functions here: the linker would merge what the variants have in common.
static inline int64_t RoundUp(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

static inline int64_t FirstSpan(const Unit& unit) { return unit.begin / kSpan; }
static inline int64_t NumSpans(const Unit& unit) {
  return (unit.end + kSpan - 1) / kSpan - FirstSpan(unit);
}

// Sums of a span or of a whole unit: per row the highest score, the sum of weights, and the
// weighted values, padded to whole vectors.
static inline int64_t SumsFloats(const Problem& problem, int64_t rows) {
  return rows * (2 + RoundUp(problem.value_dim, 16));
}

// Whether a row of the pool has two factors; rows are multiplied with them as they are unpacked.
static inline bool HasMixedRows(const Problem& problem) {
  return problem.factors && problem.planes == 1;
}

// Keys and values are unpacked to float32 before use where that pays or where rows end within a
// vector, which must not be read beyond.
static inline bool IsStaged(const Problem& problem, int64_t rows) {
  return problem.width % 16 != 0 || (problem.pool_type != Type::kFloat32 && rows > 8) ||
         HasMixedRows(problem);
}

// Each of at most ten pieces may be padded to a multiple of 16 floats.
static inline int64_t ScratchFloats(const Problem& problem, int64_t rows) {
  const int64_t width = RoundUp(problem.width, 16);
  const int64_t queries = rows * (width + kTile + 16 + 1 + 2 + 2);
  const int64_t staged = IsStaged(problem, rows) ? 2 * kTile * width : 0;
  return queries + 2 * SumsFloats(problem, rows) + staged + 10 * 16;
}

// The positions that a query sees; none when begin >= end.
struct SeenRange {
  int64_t begin, end;
};

static inline SeenRange SeenBy(const Problem& problem, int64_t sequence, int64_t position) {
  const int64_t capacity = problem.table_width * problem.page_size;
  int64_t end = problem.lengths[sequence];
  if (end > position + 1) end = position + 1;
  if (end > capacity) end = capacity;
  int64_t begin = position + 1 - problem.window;
  if (begin < 0) begin = 0;
  return {begin, end};
}

}  // namespace paged_attention
}  // namespace pk

#endif  // PALLAS_KERNELS_PAGED_ATTENTION_CPU_PROBLEM_H_
