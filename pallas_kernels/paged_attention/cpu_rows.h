// The queries of a unit, their running sums, and where both lie in a thread's scratch memory.
#ifndef PALLAS_KERNELS_PAGED_ATTENTION_CPU_ROWS_H_
#define PALLAS_KERNELS_PAGED_ATTENTION_CPU_ROWS_H_

#include "pallas_kernels/paged_attention/cpu_problem.h"
#include "pallas_kernels/paged_attention/cpu_turn.h"
#include "pallas_kernels/paged_attention/cpu_vector.h"

namespace pk {
namespace PK_VARIANT {
namespace paged_attention {

using namespace ::pk::paged_attention;

// Below every real score, and yet a number: differences of peaks stay defined.
constexpr float kMasked = -1e30f;

// Hands out pieces of a thread's scratch memory, each at a multiple of 64 bytes.
class Scratch {
 public:
  explicit Scratch(float* memory) : next_(memory) {}
  float* Take(int64_t floats) {
    float* piece = next_;
    next_ += RoundUp(floats, 16);
    return piece;
  }

 private:
  float* next_;
};

// Per row: the highest score, the weights' sum and the weighted values.
struct Sums {
  float *peak, *total, *out;
  int64_t rows, width;

  Sums(float* memory, const Problem& problem, int64_t num_rows)
      : peak(memory), total(memory + num_rows), out(memory + 2 * num_rows), rows(num_rows) {
    width = RoundUp(problem.value_dim, kLanes);
  }
  void Clear() const {
    for (int64_t r = 0; r < rows; ++r) peak[r] = kMasked;
    memset(total, 0, rows * (1 + width) * sizeof(float));
  }
};

// Adds the sums of a later span. Sums of nothing change nothing.
PK_INLINE void Merge(const Sums& into, const Sums& span) {
  for (int64_t r = 0; r < into.rows; ++r) {
    const float old_peak = into.peak[r], new_peak = span.peak[r];
    const float peak = new_peak > old_peak ? new_peak : old_peak;
    const float kept = Exp(old_peak - peak), added = Exp(new_peak - peak);
    into.peak[r] = peak;
    into.total[r] = into.total[r] * kept + span.total[r] * added;
    float* out = into.out + r * into.width;
    const float* more = span.out + r * into.width;
    for (int64_t w = 0; w < into.width; w += kLanes) {
      const Vec rest = Mul(Load(out + w), Broadcast(kept));
      Store(out + w, MulAdd(Load(more + w), Broadcast(added), rest));
    }
  }
}

template <typename Element>
PK_INLINE void UnpackRow(const Element* from, int64_t width, float* to) {
  int64_t w = 0;
  for (; w + kLanes <= width; w += kLanes) Store(to + w, LoadElements(from + w));
  for (; w < width; ++w) to[w] = ToFloat32(from[w]);
  for (; w % kLanes; ++w) to[w] = 0.0f;
}

// A unit's queries, unpacked.
struct Rows {
  const Problem& problem;
  const Unit& unit;
  int64_t count, width;
  float* q;        // [count][width]
  float* scores;   // [count][kTile], then weights
  float* totals;   // [count][kLanes]: the span's sum of weights, lane by lane
  float* kept;     // [count]: what remains of the sums when the peak rises
  int64_t *begin, *end;  // [count]: the positions that a row sees

  Rows(const Problem& p, const Unit& u, Scratch& scratch) : problem(p), unit(u), count(u.rows) {
    width = RoundUp(p.width, kLanes);
    q = scratch.Take(count * width);
    scores = scratch.Take(count * kTile);
    totals = scratch.Take(count * kLanes);
    kept = scratch.Take(count);
    begin = reinterpret_cast<int64_t*>(scratch.Take(2 * count));
    end = reinterpret_cast<int64_t*>(scratch.Take(2 * count));
    for (int64_t r = 0; r < count; ++r) FillRow(r);
  }

  int64_t Token(int64_t row) const {
    const int64_t live = (unit.first_row + row) / problem.group;
    return unit.sequence * problem.tokens + unit.live_tokens[live];
  }
  // The row's place among all queries of q and out.
  int64_t Place(int64_t row) const {
    const int64_t head = Token(row) * problem.heads + unit.head;
    return head * problem.group + Member(row);
  }
  int64_t Member(int64_t row) const { return (unit.first_row + row) % problem.group; }

 private:
  void FillRow(int64_t r) {
    const int64_t from = Place(r) * problem.width;
    if (problem.q_type == Type::kBfloat16) {
      UnpackRow(static_cast<const Bfloat16*>(problem.q) + from, problem.width, q + r * width);
    } else {
      UnpackRow(static_cast<const float*>(problem.q) + from, problem.width, q + r * width);
    }
    if (problem.turned) Turn(q + r * width, problem.width);
    const SeenRange seen = SeenBy(problem, unit.sequence, problem.positions[Token(r)]);
    begin[r] = seen.begin;
    end[r] = seen.end;
  }
};

// Writes weighted means from sums, each with its sink.
PK_INLINE void Finish(const Rows& rows, const Sums& sums) {
  const Problem& p = rows.problem;
  const float* sinks = p.sinks;
  if (sinks) sinks += rows.unit.sequence * p.sink_stride + rows.unit.head * p.group;
  for (int64_t r = 0; r < rows.count; ++r) {
    float total = sums.total[r], factor = 1.0f;
    if (sinks) {
      const float sink = sinks[rows.Member(r)], old_peak = sums.peak[r];
      const float peak = sink > old_peak ? sink : old_peak;
      factor = Exp(old_peak - peak);
      total = total * factor + Exp(sink - peak);
    }
    factor = total == 0.0f ? 0.0f : factor / total;
    const float* from = sums.out + r * sums.width;
    const int64_t to = rows.Place(r) * p.value_dim;
    for (int64_t w = 0; w < p.value_dim; ++w) {
      const float mean = from[w] * factor;
      if (p.q_type == Type::kBfloat16) {
        static_cast<uint16_t*>(p.out)[to + w] = ToBfloat16(mean);
      } else {
        static_cast<float*>(p.out)[to + w] = mean;
      }
    }
  }
}

}  // namespace paged_attention
}  // namespace PK_VARIANT
}  // namespace pk

#endif  // PALLAS_KERNELS_PAGED_ATTENTION_CPU_ROWS_H_
