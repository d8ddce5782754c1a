// Runs the native product on stacks of matrices on pools of plain threads, for the sanitizers: ragged
// tiles in buffers of exactly their size. Every row must have the bits that a product of its own has.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "pallas_kernels/grouped_matmul/cpu_groups.h"
#include "tests/native/thread_pool.h"

namespace {

using pk::grouped_matmul::Problem;
using pk::grouped_matmul::Tiles;

constexpr int64_t kMatrices = 3, kHeight = 4;
// Neighbours of one matrix, ragged ends, empty tiles, and numbers out of range.
const std::vector<int32_t> kGroups = {2, 0, 0, 0, 1, 1, 2, 99, -7, 0};
const std::vector<int32_t> kRows = {3, 4, 4, 2, 0, 1, 4, 2, 99, -1};

void Fail(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::exit(1);
}

template <typename T>
T* Data(std::vector<T>& values) {
  return values.empty() ? nullptr : values.data();
}

struct Case {
  Tiles tiles = {};
  std::vector<char> values, scales, minimums;
  std::vector<float> x;

  Case(int64_t format, int64_t activations, int64_t group, bool has_minimums, int64_t num_in,
       int64_t num_out) {
    Problem& p = tiles.first;
    p.num_in = num_in;
    p.num_out = num_out;
    p.group = group;
    if (const char* why = pk::quant_matmul::SetFormat(p, format, activations)) Fail(why);
    tiles.num_tiles = static_cast<int64_t>(kGroups.size());
    tiles.height = kHeight;
    tiles.num_matrices = kMatrices;
    tiles.groups = kGroups.data();
    tiles.rows = kRows.data();
    std::mt19937 random(7);
    values.resize(static_cast<size_t>(kMatrices * p.blocks * p.block_bytes));
    // Small finite numbers in every format: the highest bits of all its exponents stay clear.
    const uint32_t masks[] = {0x3fffffffu, 0x3fff3fffu, 0x3fff3fffu, ~0u, ~0u, 0x3f3f3f3fu};
    for (size_t at = 0; at < values.size(); at += 4) {
      const uint32_t word = static_cast<uint32_t>(random()) & masks[format];
      std::memcpy(&values[at], &word, 4);
    }
    if (format >= pk::quant_matmul::kInt8) {
      p.groups = group ? (num_in + group - 1) / group : 1;
      scales = Floats(kMatrices * p.blocks * p.groups * 16, random);
      if (has_minimums) minimums = Floats(kMatrices * p.blocks * p.groups * 16, random);
    }
    p.values = Data(values);
    p.scales = Data(scales);
    p.minimums = Data(minimums);
    if (const char* why = pk::quant_matmul::SetChunks(p)) Fail(why);
    for (int64_t i = 0; i < tiles.num_tiles * kHeight * num_in; ++i) {
      x.push_back(static_cast<float>(random() % 255) / 64.0f - 2.0f);
    }
    x.shrink_to_fit();
    p.x = Data(x);
  }

  static std::vector<char> Floats(int64_t count, std::mt19937& random) {
    std::vector<char> bytes(static_cast<size_t>(count * 4));
    for (size_t at = 0; at < bytes.size(); at += 4) {
      const float value = static_cast<float>(random() % 100) / 100.0f + 0.01f;
      std::memcpy(&bytes[at], &value, 4);
    }
    return bytes;
  }

  std::vector<float> Run(Pool& pool, int variant, int64_t max_threads) const {
    const size_t size = static_cast<size_t>(tiles.num_tiles * kHeight * tiles.first.num_out);
    std::vector<float> y(size, NAN);
    Tiles t = tiles;
    t.first.y = Data(y);
    pk::grouped_matmul::Run(pool, t, variant, max_threads);
    return y;
  }

  // Each tile by itself, its matrix cut out of the stack.
  std::vector<float> RunApart(Pool& pool, int variant) const {
    const Problem& first = tiles.first;
    std::vector<float> y(static_cast<size_t>(tiles.num_tiles * kHeight * first.num_out), 0.0f);
    for (int64_t tile = 0; tile < tiles.num_tiles; ++tile) {
      const int64_t group = kGroups[static_cast<size_t>(tile)];
      const int64_t matrix = group < 0 ? 0 : group < kMatrices ? group : kMatrices - 1;
      const int64_t wanted = kRows[static_cast<size_t>(tile)];
      Problem p = first;
      const int64_t bytes = p.blocks * p.block_bytes, floats = p.blocks * p.groups * 16;
      p.values += matrix * bytes;
      if (p.scales) p.scales += matrix * floats * 4;
      if (p.minimums) p.minimums += matrix * floats * 4;
      p.x = x.data() + tile * kHeight * p.num_in;
      p.rows = wanted < 0 ? 0 : wanted < kHeight ? wanted : kHeight;
      p.y = y.data() + tile * kHeight * p.num_out;
      pk::quant_matmul::Run(pool, p, variant, 1);
    }
    return y;
  }
};

void Check(const Case& one, Pool& pool, int variant, const std::vector<float>& want) {
  for (const int64_t max_threads : {0, 1}) {
    const std::vector<float> y = one.Run(pool, variant, max_threads);
    if (std::memcmp(y.data(), want.data(), y.size() * sizeof(float)) != 0) {
      Fail("a row differs from its product alone");
    }
  }
}

}  // namespace

int main() {
  for (int variant = 0; variant < pk::kNumVariants; ++variant) {
    if (!pk::CanRun(variant)) continue;
    Pool two(2), eight(8);
    for (int64_t format = 0; format < 6; ++format) {
      const bool is_scaled = format >= pk::quant_matmul::kInt8;
      const bool has_codes = is_scaled && format != pk::quant_matmul::kFloat8;
      for (const int64_t num_out : {21, 700}) {
        const int64_t num_in = num_out == 21 ? 300 : 40;
        const Case one(format, has_codes ? 2 : 0, is_scaled ? 32 : 0, has_codes, num_in, num_out);
        const std::vector<float> want = one.RunApart(two, variant);
        Check(one, two, variant, want);
        Check(one, eight, variant, want);
      }
    }
    std::printf("%s\n", pk::kVariantNames[variant]);
  }
  return 0;
}
