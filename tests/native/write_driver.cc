// Writes to pools of every dtype on pools of plain threads, for the sanitizers: odd shapes, buffers of
// exactly their size, places outside the pool, alone and many at a time. Every number of a token is as
// large as its token's index says. Exits with 1 at the first wrong result.
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "pallas_kernels/kv_write/cpu_run.h"
#include "tests/native/thread_pool.h"

namespace {

using pk::kv_write::Problem;
using pk::kv_write::Type;

constexpr Type kTypes[] = {Type::kFloat32, Type::kBfloat16, Type::kFloat16, Type::kInt8,
                           Type::kFloat8};
constexpr int64_t kSizes[] = {4, 2, 2, 1, 1};
constexpr char kUntouched = 0x55;

float FromUpper(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// What the bits of a type stand for; powers of two only.
float Decode(Type type, const char* from) {
  uint16_t half = 0;
  float value;
  switch (type) {
    case Type::kFloat32:
      std::memcpy(&value, from, 4);
      return value;
    case Type::kBfloat16:
      std::memcpy(&half, from, 2);
      return FromUpper(half);
    case Type::kFloat16:
      std::memcpy(&half, from, 2);
      return std::ldexp(1.0f + static_cast<float>(half & 1023) / 1024.0f, (half >> 10) - 15);
    case Type::kInt8:
      return static_cast<float>(*from);
    default:
      return std::ldexp(1.0f + static_cast<float>(*from & 7) / 8.0f, (*from >> 3 & 15) - 7);
  }
}

struct Shape {
  int type;
  int64_t planes, width, heads, tokens;
  bool halves, turned;
};

struct Case {
  Problem problem = {};
  std::vector<char> given;
  std::vector<int32_t> layers, pages, offsets;

  explicit Case(const Shape& shape) {
    Problem& p = problem;
    p.batch = 2, p.layers_in_pool = 2, p.num_pages = 9, p.page_size = 7;
    p.num_tokens = shape.tokens, p.heads = shape.heads, p.planes = shape.planes;
    p.width = shape.width;
    p.value_dim = shape.planes == 1 ? shape.width - 3 : shape.width;
    p.pool_type = kTypes[shape.type];
    p.token_type = p.pool_type == Type::kFloat16 ? Type::kFloat16
                   : shape.halves                ? Type::kBfloat16
                                                 : Type::kFloat32;
    if (p.pool_type == Type::kFloat32) p.token_type = Type::kFloat32;
    p.turned = shape.turned;
    layers = {1, 0};
    const int64_t count = p.batch * p.num_tokens, row = p.heads * p.planes * p.width;
    const int64_t size = p.token_type == Type::kFloat32 ? 4 : 2;
    given.resize(static_cast<size_t>(count * row * size));
    for (int64_t token = 0; token < count; ++token) {
      // Every eleventh token is outside, on every side.
      const bool outside = token % 11 == 10;
      pages.push_back(static_cast<int32_t>(outside ? (token % 2 ? -1 : p.num_pages) : token / 7));
      offsets.push_back(static_cast<int32_t>(outside && token % 3 ? p.page_size : token % 7));
      for (int64_t i = 0; i < row; ++i) {
        Put(token % 4, &given[static_cast<size_t>((token * row + i) * size)]);
      }
    }
  }

  // 2^power in the tokens' dtype.
  void Put(int64_t power, char* to) const {
    const float value = std::ldexp(1.0f, static_cast<int>(power));
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (problem.token_type == Type::kFloat32) {
      std::memcpy(to, &bits, 4);
      return;
    }
    const uint16_t half = problem.token_type == Type::kBfloat16
                              ? static_cast<uint16_t>(bits >> 16)
                              : static_cast<uint16_t>((15 + power) << 10);
    std::memcpy(to, &half, 2);
  }

  // The pool, and behind it the factors.
  std::vector<char> Run(Pool& threads, int variant, int64_t max_threads) const {
    Problem p = problem;
    const int64_t heads = p.layers_in_pool * p.num_pages * p.heads;
    const int64_t bytes = heads * p.planes * p.page_size * p.width * PoolSize();
    std::vector<char> pool(static_cast<size_t>(bytes), kUntouched);
    std::vector<uint16_t> factors(static_cast<size_t>(heads * 2 * p.page_size), 0x5555);
    p.pool = pool.data();
    p.factors = p.pool_type >= Type::kInt8 ? factors.data() : nullptr;
    p.tokens = given.data(), p.layers = layers.data();
    p.pages = pages.data(), p.offsets = offsets.data();
    pk::kv_write::Run(p, variant, max_threads, threads);
    const char* raw = reinterpret_cast<const char*>(factors.data());
    pool.insert(pool.end(), raw, raw + factors.size() * 2);
    return pool;
  }

  int64_t PoolSize() const {
    for (int type = 0; type < 5; ++type) {
      if (kTypes[type] == problem.pool_type) return kSizes[type];
    }
    return 0;
  }

  void Check(const std::vector<char>& out) const {
    const Problem& p = problem;
    const int64_t heads = p.layers_in_pool * p.num_pages * p.heads;
    const int64_t bytes = heads * p.planes * p.page_size * p.width * PoolSize();
    int64_t written = 0, touched = 0;
    for (int64_t token = 0; token < p.batch * p.num_tokens; ++token) {
      if (token % 11 == 10) continue;
      for (int64_t head = 0; head < p.heads; ++head) {
        CheckToken(out, bytes, token, head);
        written += p.planes * p.width;
      }
    }
    for (int64_t i = 0; i < bytes; i += PoolSize()) {
      touched += out[static_cast<size_t>(i)] != kUntouched ||
                 out[static_cast<size_t>(i + PoolSize() - 1)] != kUntouched;
    }
    if (touched != written) {
      std::fprintf(stderr, "something else was written too\n");
      std::exit(1);
    }
  }

  void CheckToken(const std::vector<char>& out, int64_t bytes, int64_t token, int64_t head) const {
    const Problem& p = problem;
    const int64_t layer = layers[static_cast<size_t>(token / p.num_tokens)];
    const int64_t place = (layer * p.num_pages + token / 7) * p.heads + head, offset = token % 7;
    for (int64_t plane = p.turned ? 1 : 0; plane < p.planes; ++plane) {
      const int64_t row = (place * p.planes + plane) * p.page_size + offset;
      for (int64_t w = 0; w < p.width; ++w) {
        float value = Decode(p.pool_type, &out[static_cast<size_t>((row * p.width + w) * PoolSize())]);
        if (p.pool_type >= Type::kInt8) {
          const int64_t part = p.planes == 2 ? plane : w >= p.value_dim;
          uint16_t factor;
          const int64_t at = bytes + 2 * ((place * 2 + part) * p.page_size + offset);
          std::memcpy(&factor, &out[static_cast<size_t>(at)], 2);
          value *= FromUpper(factor);
        }
        const float known = std::ldexp(1.0f, static_cast<int>(token % 4));
        if (!(std::fabs(value - known) <= 0.004f * known)) {
          std::fprintf(stderr, "dtype %d width %ld: %g instead of %g\n",
                       static_cast<int>(p.pool_type), static_cast<long>(p.width), value, known);
          std::exit(1);
        }
      }
    }
  }
};

std::deque<Case> MakeCases() {
  std::deque<Case> cases;
  for (int type = 0; type < 5; ++type) {
    for (int64_t planes = 1; planes <= 2; ++planes) {
      const bool turned = type >= 3 && planes == 2;
      cases.emplace_back(Shape{type, planes, 33, 3, 1, false, turned});
      cases.emplace_back(Shape{type, planes, 64, 2, 13, true, turned});
      cases.emplace_back(Shape{type, planes, 24, 5, 30, false, false});
    }
  }
  return cases;
}

}  // namespace

int main() {
  RunInEveryVariant(MakeCases());
  return 0;
}
