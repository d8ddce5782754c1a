// Attention of one unit: some queries of one sequence and key head over the keys that they see.
#include "pallas_kernels/paged_attention/cpu_rows.h"
#include "pallas_kernels/paged_attention/cpu_tiles.h"

namespace pk {
namespace PK_VARIANT {
namespace paged_attention {

// The factors of a tile's codes: those of keys and of values, or of value columns and the rest.
struct Factors {
  float first[kTile], second[kTile];
};

// What indexing does in JAX: negative numbers count from the end, and what is left is clamped.
PK_INLINE int64_t Inside(int64_t index, int64_t size) {
  if (index < 0) index += size;
  return index < 0 ? 0 : index >= size ? size - 1 : index;
}

// The page and key head, of all in the pool, where a position's key lies.
PK_INLINE int64_t HeadOfPage(const Problem& p, const Unit& unit, int64_t position) {
  const int32_t* pages = p.table + unit.sequence * p.table_width;
  const int64_t page = Inside(pages[position / p.page_size], p.pages);
  const int64_t layer = Inside(p.layers[unit.sequence], p.layers_in_pool);
  return (layer * p.pages + page) * p.heads + unit.head;
}

template <typename Element>
PK_INLINE void LoadFactors(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = FromBfloat16(from[i]) * kUnit<Element>;
}

// Finds the keys and values of a tile that starts at position `start`; false where the unit sees
// none.
template <typename Element>
bool Locate(const Problem& p, const Unit& unit, int64_t start, Tile<Element>& tile,
            Factors& factors) {
  tile.begin = unit.begin > start ? unit.begin - start : 0;
  tile.end = unit.end < start + kTile ? unit.end - start : kTile;
  if (tile.begin >= tile.end) return false;
  const Element* pool = static_cast<const Element*>(p.pool);
  const int64_t size = p.page_size;
  for (int64_t k = tile.begin; k < tile.end;) {
    const int64_t head = HeadOfPage(p, unit, start + k), offset = (start + k) % size;
    const int64_t in_page = size - offset, in_tile = tile.end - k;
    const int64_t run = in_page < in_tile ? in_page : in_tile;
    const Element* keys = pool + (head * p.planes * size + offset) * p.width;
    const Element* values = keys + (p.planes - 1) * size * p.width;
    for (int64_t i = 0; i < run; ++i) {
      tile.keys[k + i] = keys + i * p.width;
      tile.values[k + i] = values + i * p.width;
    }
    if (p.factors) {
      const uint16_t* from = p.factors + head * 2 * size + offset;
      LoadFactors<Element>(from, run, factors.first + k);
      LoadFactors<Element>(from + size, run, factors.second + k);
    }
    k += run;
  }
  FillAround(tile);
  return true;
}

// Multiplies a latent with its two factors.
PK_INLINE void ScaleLatent(const Problem& p, float first, float second, float* latent) {
  for (int64_t w = 0; w < p.value_dim; ++w) latent[w] *= first;
  for (int64_t w = p.value_dim; w < p.width; ++w) latent[w] *= second;
}

// Unpacks a tile to float32 rows of whole vectors.
template <typename Element>
void Stage(const Problem& p, const Tile<Element>& from, const Factors& factors, float* staged,
           Tile<float>& to) {
  const int64_t width = RoundUp(p.width, kLanes);
  to.begin = from.begin;
  to.end = from.end;
  for (int64_t k = from.begin; k < from.end; ++k) {
    float* key = staged + k * width;
    float* value = p.planes == 1 ? key : key + kTile * width;
    UnpackRow(from.keys[k], p.width, key);
    if (p.planes > 1) UnpackRow(from.values[k], p.width, value);
    if (HasMixedRows(p)) ScaleLatent(p, factors.first[k], factors.second[k], key);
    to.keys[k] = key;
    to.values[k] = value;
  }
  FillAround(to);
}

// The positions of a tile that a row sees, from vector to vector.
struct Part {
  int64_t begin, end, first, last;
};

// Scales, caps and masks a row's scores, and returns the highest of them.
PK_INLINE float MaskScores(const Problem& p, const Factors* factors, const Part& part,
                           float* scores) {
  const Vec begin = Broadcast(static_cast<float>(part.begin));
  const Vec end = Broadcast(static_cast<float>(part.end));
  const Vec hidden = Broadcast(-__builtin_inff());
  Vec highest = Broadcast(kMasked);
  for (int64_t k = part.first; k < part.last; k += kLanes) {
    Vec score = Load(scores + k);
    if (factors) score = Mul(score, Load(factors->first + k));
    if (p.softcap != 0.0f) {
      score = Mul(Broadcast(p.softcap), Tanh(Div(score, Broadcast(p.softcap))));
    }
    if (k < part.begin || k + kLanes > part.end) {
      const Vec position = Add(LaneIndex(), Broadcast(static_cast<float>(k)));
      score = SelectLess(position, begin, hidden, SelectLess(position, end, score, hidden));
    }
    Store(scores + k, score);
    highest = Max(highest, score);
  }
  return LargestLane(highest);
}

// Turns a row's scores into weights, and moves its peak and its weights' sum along.
PK_INLINE void Weigh(const Problem& p, const Factors* factors, const Part& part, const Rows& rows,
                     const Sums& sums, int64_t row) {
  float* scores = rows.scores + row * kTile;
  const float highest = MaskScores(p, factors, part, scores), old_peak = sums.peak[row];
  const float peak = highest > old_peak ? highest : old_peak, kept = Exp(old_peak - peak);
  Vec total = Mul(Load(rows.totals + row * kLanes), Broadcast(kept));
  for (int64_t k = part.first; k < part.last; k += kLanes) {
    const Vec weight = Exp(Sub(Load(scores + k), Broadcast(peak)));
    total = Add(total, weight);
    Store(scores + k, factors ? Mul(weight, Load(factors->second + k)) : weight);
  }
  Store(rows.totals + row * kLanes, total);
  sums.peak[row] = peak;
  rows.kept[row] = kept;
}

// Adds a tile to the sums of kRows rows, unless none of them sees any of it. Without factors its
// elements are what they stand for.
template <typename Element, int kRows>
void AddTile(const Tile<Element>& tile, const Tile<Element>* ahead, const Factors* factors,
             int64_t start, const Rows& rows, const Sums& sums, int64_t row) {
  const Problem& p = rows.problem;
  Part parts[kRows];
  int64_t begin = kTile, end = 0;
  for (int r = 0; r < kRows; ++r) {
    Part& part = parts[r];
    part.begin = rows.begin[row + r] > start ? rows.begin[row + r] - start : 0;
    part.end = rows.end[row + r] < start + kTile ? rows.end[row + r] - start : kTile;
    if (part.begin >= part.end) continue;
    begin = part.begin < begin ? part.begin : begin;
    end = part.end > end ? part.end : end;
  }
  if (begin >= end) return;
  float* scores = rows.scores + row * kTile;
  Score<Element, kRows>(rows.q + row * rows.width, rows.width, tile, ahead, begin, end, p.scale,
                        scores);
  for (int r = 0; r < kRows; ++r) {
    Part& part = parts[r];
    part.first = begin / kLanes * kLanes;
    part.last = RoundUp(end, kLanes);
    if (part.begin < part.end) {
      Weigh(p, factors, part, rows, sums, row + r);
    } else {
      rows.kept[row + r] = 1.0f;
      for (int64_t k = part.first; k < part.last; ++k) scores[r * kTile + k] = 0.0f;
    }
  }
  AddValues<Element, kRows>(scores, rows.kept + row, tile, p.planes > 1 ? ahead : nullptr, begin,
                            end, sums.out + row * sums.width, sums.width);
}

// While the first rows read a tile, the tile `ahead` is asked for.
template <typename Element>
void AddTileToRows(const Tile<Element>& tile, const Tile<Element>* ahead, const Factors* factors,
                   int64_t start, const Rows& rows, const Sums& sums) {
  const int64_t whole = rows.count / 4 * 4;
  for (int64_t row = 0; row < whole; row += 4, ahead = nullptr) {
    AddTile<Element, 4>(tile, ahead, factors, start, rows, sums, row);
  }
  switch (rows.count - whole) {
    case 1:
      return AddTile<Element, 1>(tile, ahead, factors, start, rows, sums, whole);
    case 2:
      return AddTile<Element, 2>(tile, ahead, factors, start, rows, sums, whole);
    case 3:
      return AddTile<Element, 3>(tile, ahead, factors, start, rows, sums, whole);
  }
}

// Sums a span from nothing.
template <typename Element>
void AddSpan(const Rows& rows, int64_t span, float* staged, const Sums& sums) {
  const Problem& p = rows.problem;
  sums.Clear();
  memset(rows.totals, 0, rows.count * kLanes * sizeof(float));
  Tile<Element> tiles[2];
  Factors factors[2] = {};
  int64_t start = span * kSpan;
  bool seen = Locate(p, rows.unit, start, tiles[0], factors[0]);
  for (int now = 0; start < (span + 1) * kSpan; start += kTile, now ^= 1) {
    const bool more = Locate(p, rows.unit, start + kTile, tiles[now ^ 1], factors[now ^ 1]);
    const Tile<Element>* ahead = more ? &tiles[now ^ 1] : nullptr;
    const Factors* left = p.factors && !HasMixedRows(p) ? &factors[now] : nullptr;
    if (seen && IsStaged(p, rows.count)) {
      Tile<float> unpacked;
      Stage(p, tiles[now], factors[now], staged, unpacked);
      AddTileToRows<float>(unpacked, nullptr, left, start, rows, sums);
    } else if (seen) {
      AddTileToRows(tiles[now], ahead, left, start, rows, sums);
    }
    seen = more;
  }
  for (int64_t r = 0; r < rows.count; ++r) {
    sums.total[r] = SumLanes(Load(rows.totals + r * kLanes));
  }
}

PK_INLINE void AddSpanOfType(const Rows& rows, int64_t span, float* staged, const Sums& sums) {
  switch (rows.problem.pool_type) {
    case Type::kFloat32:
      return AddSpan<float>(rows, span, staged, sums);
    case Type::kBfloat16:
      return AddSpan<Bfloat16>(rows, span, staged, sums);
    case Type::kFloat16:
      return AddSpan<Float16>(rows, span, staged, sums);
    case Type::kInt8:
      return AddSpan<int8_t>(rows, span, staged, sums);
    case Type::kFloat8:
      return AddSpan<Float8>(rows, span, staged, sums);
  }
}

PK_INLINE float* TakeStaged(const Problem& p, const Rows& rows, Scratch& scratch) {
  return IsStaged(p, rows.count) ? scratch.Take(2 * kTile * rows.width) : nullptr;
}

}  // namespace paged_attention

// Computes a unit from its first to its last span.
void PagedAttentionUnit(const ::pk::paged_attention::Problem& problem,
                        const ::pk::paged_attention::Unit& unit, float* memory) {
  using namespace paged_attention;
  Scratch scratch(memory);
  const Rows rows(problem, unit, scratch);
  const Sums whole(scratch.Take(SumsFloats(problem, rows.count)), problem, rows.count);
  const Sums span(scratch.Take(SumsFloats(problem, rows.count)), problem, rows.count);
  float* staged = TakeStaged(problem, rows, scratch);
  whole.Clear();
  for (int64_t i = 0; i < NumSpans(unit); ++i) {
    AddSpanOfType(rows, FirstSpan(unit) + i, staged, span);
    Merge(whole, span);
  }
  Finish(rows, whole);
}

// Computes one span of a unit, whose sums are left for PagedAttentionMerge.
void PagedAttentionSpan(const ::pk::paged_attention::Problem& problem,
                        const ::pk::paged_attention::Unit& unit, int64_t span, float* memory,
                        float* sums) {
  using namespace paged_attention;
  Scratch scratch(memory);
  const Rows rows(problem, unit, scratch);
  float* staged = TakeStaged(problem, rows, scratch);
  AddSpanOfType(rows, FirstSpan(unit) + span, staged, Sums(sums, problem, rows.count));
}

// Merges the sums of a unit's spans, which lie one behind the other.
void PagedAttentionMerge(const ::pk::paged_attention::Problem& problem,
                         const ::pk::paged_attention::Unit& unit, float* spans, float* memory) {
  using namespace paged_attention;
  Scratch scratch(memory);
  const Rows rows(problem, unit, scratch);
  const int64_t floats = SumsFloats(problem, rows.count);
  const Sums whole(scratch.Take(floats), problem, rows.count);
  whole.Clear();
  for (int64_t i = 0; i < NumSpans(unit); ++i) {
    Merge(whole, Sums(spans + i * floats, problem, rows.count));
  }
  Finish(rows, whole);
}

}  // namespace PK_VARIANT
}  // namespace pk
