// Runs native attention on pools of plain threads, for the sanitizers: every dtype of a cache on odd
// shapes, in buffers of exactly their size, alone and many at a time. What a query sees has one value
// everywhere, and what it does not see another. Exits with 1 at the first wrong result.
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <vector>

#include "pallas_kernels/paged_attention/cpu_run.h"
#include "tests/native/thread_pool.h"

namespace {

using pk::paged_attention::Problem;
using pk::paged_attention::Type;

constexpr Type kTypes[] = {Type::kFloat32, Type::kBfloat16, Type::kFloat16, Type::kInt8,
                           Type::kFloat8};
constexpr int64_t kSizes[] = {4, 2, 2, 1, 1};

// The bits of 1, -1 and of something that nobody may look at. A factor of two is still to come.
constexpr uint32_t kOne[] = {0x3f800000u, 0x3f80u, 0x3c00u, 2, 0x40u};
constexpr uint32_t kMinusOne[] = {0xbf800000u, 0xbf80u, 0xbc00u, 0xfeu, 0xc0u};
constexpr uint32_t kHidden[] = {0x7fc00000u, 0x7fc0u, 0x7e00u, 100, 0x70u};
constexpr uint16_t kHalf = 0x3f00, kNaN = 0x7fc0;

struct Shape {
  int type;
  int64_t planes, width, page_size, group, tokens, window;
  bool capped, wide_queries;
};

struct Case {
  Problem problem = {};
  std::vector<char> pool, q;
  std::vector<uint16_t> factors;
  std::vector<int32_t> layers, table, positions, lengths;

  explicit Case(const Shape& shape) {
    Problem& p = problem;
    p.batch = 3, p.heads = 2, p.layers_in_pool = 2;
    p.tokens = shape.tokens, p.group = shape.group, p.width = shape.width;
    p.planes = shape.planes, p.page_size = shape.page_size;
    p.value_dim = shape.planes == 1 ? shape.width - 3 : shape.width;
    p.pool_type = kTypes[shape.type];
    p.q_type = shape.wide_queries ? Type::kFloat32 : Type::kBfloat16;
    p.scale = 0.25f, p.softcap = shape.capped ? 3.0f : 0.0f;
    p.window = shape.window;
    layers = {1, 0, -1};
    lengths = {300, 1, 70};
    p.table_width = 300 / p.page_size + 1;
    p.pages = 1 + p.batch * p.table_width;
    for (int32_t page = 1; page < p.pages; ++page) table.push_back(page);
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t t = 0; t < p.tokens; ++t) {
        positions.push_back(static_cast<int32_t>(lengths[b] - p.tokens + t));
      }
    }
    FillPool(shape.type);
    FillQueries();
    Point();
  }

  void FillPool(int type) {
    const Problem& p = problem;
    const int64_t size = kSizes[type];
    const int64_t rows = p.layers_in_pool * p.pages * p.heads * p.planes * p.page_size;
    pool.resize(static_cast<size_t>(rows * p.width * size));
    const bool coded = p.pool_type >= Type::kInt8;
    if (coded) {
      factors.assign(static_cast<size_t>(rows / p.planes * 2), kNaN);
    }
    std::mt19937 random(static_cast<unsigned>(rows + p.width));
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t offset = row % p.page_size, plane = row / p.page_size % p.planes;
      const int64_t head = row / p.page_size / p.planes, page = head / p.heads % p.pages;
      const bool live = page > 0 && IsLive((page - 1) / p.table_width,
                                           (page - 1) % p.table_width * p.page_size + offset);
      const bool is_value = plane == p.planes - 1;
      for (int64_t w = 0; w < p.width; ++w) {
        uint32_t bits = is_value && w < p.value_dim ? kOne[type]
                        : random() % 2              ? kOne[type]
                                                    : kMinusOne[type];
        if (!live) bits = kHidden[type];
        std::memcpy(&pool[static_cast<size_t>((row * p.width + w) * size)], &bits,
                    static_cast<size_t>(size));
      }
      for (int64_t part = 0; coded && live && part < 2; ++part) {
        factors[static_cast<size_t>((head * 2 + part) * p.page_size + offset)] = kHalf;
      }
    }
  }

  // Whether any query of a row sees a position.
  bool IsLive(int64_t b, int64_t position) const {
    const int64_t oldest = lengths[static_cast<size_t>(b)] - problem.tokens;
    return position < lengths[static_cast<size_t>(b)] &&
           position > (oldest < 0 ? 0 : oldest) - problem.window;
  }

  void FillQueries() {
    const Problem& p = problem;
    const int64_t count = p.batch * p.tokens * p.heads * p.group * p.width;
    const size_t size = p.q_type == Type::kFloat32 ? 4 : 2;
    q.resize(static_cast<size_t>(count) * size);
    std::mt19937 random(1);
    for (int64_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(random() % 64) / 32.0f - 1.0f;
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      if (size == 2) bits >>= 16;  // seven bits are enough for these
      std::memcpy(&q[static_cast<size_t>(i) * size], &bits, size);
    }
  }

  void Point() {
    Problem& p = problem;
    p.q = q.data(), p.pool = pool.data();
    p.factors = factors.empty() ? nullptr : factors.data();
    p.layers = layers.data(), p.table = table.data();
    p.positions = positions.data(), p.lengths = lengths.data();
  }

  std::vector<char> Run(Pool& threads, int variant, int64_t max_threads) const {
    const int64_t count = problem.batch * problem.tokens * problem.heads * problem.group;
    const size_t size = problem.q_type == Type::kFloat32 ? 4 : 2;
    std::vector<char> out(static_cast<size_t>(count * problem.value_dim) * size, 0x7f);
    Problem p = problem;
    p.out = out.data();
    pk::paged_attention::Run(p, variant, max_threads, threads);
    return out;
  }

  // A query sees something unless it stands before its row's first token.
  void Check(const std::vector<char>& out) const {
    const Problem& p = problem;
    const size_t size = p.q_type == Type::kFloat32 ? 4 : 2;
    for (size_t i = 0; i < out.size() / size; ++i) {
      uint32_t bits = 0;
      std::memcpy(reinterpret_cast<char*>(&bits) + (4 - size), &out[i * size], size);
      float value;
      std::memcpy(&value, &bits, 4);
      const size_t token = i / static_cast<size_t>(p.heads * p.group * p.value_dim);
      const float known = positions[token] < 0 ? 0.0f : 1.0f;
      if (!(std::fabs(value - known) <= 1e-5f)) {
        std::fprintf(stderr, "dtype %d width %ld: %g instead of %g\n",
                     static_cast<int>(p.pool_type), static_cast<long>(p.width), value, known);
        std::exit(1);
      }
    }
  }
};

std::deque<Case> MakeCases() {
  constexpr int64_t kAll = int64_t{1} << 32;
  std::deque<Case> cases;
  for (int type = 0; type < 5; ++type) {
    for (int64_t planes = 1; planes <= 2; ++planes) {
      cases.emplace_back(Shape{type, planes, 16, 16, 3, 1, kAll, false, true});
      cases.emplace_back(Shape{type, planes, 33, 5, 4, 3, 70, true, true});
      cases.emplace_back(Shape{type, planes, 48, 64, 7, 13, kAll, true, false});
      cases.emplace_back(Shape{type, planes, 32, 7, 2, 1, 130, false, false});
    }
  }
  return cases;
}

}  // namespace

int main() {
  RunInEveryVariant(MakeCases());
  return 0;
}
