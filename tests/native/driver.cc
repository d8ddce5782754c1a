// Runs the native product on pools of plain threads, for the sanitizers: every format on odd shapes,
// in buffers of exactly their size, alone and many at a time. Exits with 1 at the first wrong result.
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <vector>

#include "pallas_kernels/quant_matmul/cpu_product.h"
#include "tests/native/thread_pool.h"

namespace {

using pk::quant_matmul::Problem;

// A matrix whose packed codes are all equal: what a row comes to is known without unpacking.
struct Case {
  Problem problem = {};
  std::vector<char> values;
  std::vector<float> x;
  std::vector<char> scales, minimums;

  Case(int64_t format, int64_t activations, int64_t group, bool has_minimums, bool half_scales,
       int64_t rows, int64_t num_in, int64_t num_out) {
    Problem& p = problem;
    p.rows = rows;
    p.num_in = num_in;
    p.num_out = num_out;
    p.group = group;
    if (const char* why = pk::quant_matmul::SetFormat(p, format, activations)) Fail(why);
    values.resize(static_cast<size_t>(p.blocks * p.block_bytes));
    const uint32_t ones[] = {0x3f800000u, 0x3f803f80u, 0x3c003c00u,
                             0x01010101u, 0x99999999u, 0x38383838u};
    for (size_t at = 0; at < values.size(); at += 4) std::memcpy(&values[at], &ones[format], 4);
    if (format >= pk::quant_matmul::kInt8) {
      p.groups = group ? (num_in + group - 1) / group : 1;
      p.scales_are_half = half_scales;
      scales = Filled(p.blocks * p.groups * 16, half_scales ? 0x38003800u : 0x3f000000u);  // 0.5
      if (has_minimums) {
        minimums = Filled(p.blocks * p.groups * 16, half_scales ? 0xb400b400u : 0xbe800000u);
      }
    }
    Point();
    if (const char* why = pk::quant_matmul::SetChunks(p)) Fail(why);
    std::mt19937 random(static_cast<unsigned>(rows * 1000 + num_in));
    for (int64_t i = 0; i < rows * num_in; ++i) {
      x.push_back(static_cast<float>(random() % 255) / 64.0f - 2.0f);
    }
    x.shrink_to_fit();
    Point();
  }

  // Floats of the bits' type, two of them in a word where they are halves.
  std::vector<char> Filled(int64_t count, uint32_t bits) const {
    std::vector<char> bytes(static_cast<size_t>(count * (problem.scales_are_half ? 2 : 4)));
    for (size_t at = 0; at < bytes.size(); at += 4) std::memcpy(&bytes[at], &bits, 4);
    return bytes;
  }

  void Point() {
    problem.values = values.data();
    problem.scales = scales.empty() ? nullptr : scales.data();
    problem.minimums = minimums.empty() ? nullptr : minimums.data();
    problem.x = x.data();
  }

  static void Fail(const char* why) {
    std::fprintf(stderr, "%s\n", why);
    std::exit(1);
  }

  // An int4 code of nine is one with the offset of eight, and nine without.
  double Entry() const {
    if (problem.format < pk::quant_matmul::kInt8) return 1.0;
    const double code = problem.format == pk::quant_matmul::kInt4 && problem.minimums ? 9.0 : 1.0;
    return 0.5 * code - (problem.minimums ? 0.25 : 0.0);
  }

  std::vector<float> Run(Pool& pool, int variant, int64_t max_threads) const {
    std::vector<float> y(static_cast<size_t>(problem.rows * problem.num_out), NAN);
    Problem p = problem;
    p.y = y.data();
    pk::quant_matmul::Run(pool, p, variant, max_threads);
    return y;
  }

  void Check(const std::vector<float>& y) const {
    const double tolerance = problem.activations == pk::quant_matmul::kActInt8 ? 0.02 : 1e-5;
    for (int64_t row = 0; row < problem.rows; ++row) {
      double sum = 0, magnitude = 1e-6;
      for (int64_t k = 0; k < problem.num_in; ++k) {
        sum += x[static_cast<size_t>(row * problem.num_in + k)];
        magnitude += std::fabs(x[static_cast<size_t>(row * problem.num_in + k)]);
      }
      for (int64_t column = 0; column < problem.num_out; ++column) {
        const double error = y[static_cast<size_t>(row * problem.num_out + column)] - sum * Entry();
        if (!(std::fabs(error) <= tolerance * magnitude * (1.0 + std::fabs(Entry())))) {
          std::fprintf(stderr, "format %d rows %ld row %ld column %ld: off by %g\n", problem.format,
                       static_cast<long>(problem.rows), static_cast<long>(row),
                       static_cast<long>(column), error);
          std::exit(1);
        }
      }
    }
  }
};

// Pointers into vectors survive a move of the vectors, not a copy.
std::deque<Case> MakeCases(int64_t num_in, int64_t num_out, const std::vector<int64_t>& all_rows) {
  std::deque<Case> cases;
  for (const int64_t rows : all_rows) {
    for (int64_t format = 0; format < 6; ++format) {
      const bool has_codes = format == pk::quant_matmul::kInt8 || format == pk::quant_matmul::kInt4;
      cases.emplace_back(format, 0, 0, false, false, rows, num_in, num_out);
      if (format == pk::quant_matmul::kBfloat16) {
        cases.emplace_back(format, 1, 0, false, false, rows, num_in, num_out);
      }
      if (format < pk::quant_matmul::kInt8) continue;
      cases.emplace_back(format, 0, 32, true, true, rows, num_in, num_out);
      if (has_codes) cases.emplace_back(format, 2, 16, true, true, rows, num_in, num_out);
      if (has_codes) cases.emplace_back(format, 2, 0, false, false, rows, num_in, num_out);
    }
  }
  return cases;
}

}  // namespace

int main() {
  const std::deque<Case> small = MakeCases(300, 21, {0, 1, 2, 3, 5, 8, 13});
  const std::deque<Case> wide = MakeCases(40, 700, {1, 20});
  for (int variant = 0; variant < pk::kNumVariants; ++variant) {
    if (!pk::CanRun(variant)) continue;
    Pool two(2), eight(8);
    for (const std::deque<Case>* cases : {&small, &wide}) {
      for (const Case& one : *cases) {
        const std::vector<float> alone = one.Run(two, variant, 1);
        one.Check(alone);
        for (Pool* pool : {&two, &eight}) {
          const std::vector<float> y = one.Run(*pool, variant, 0);
          if (!y.empty() && std::memcmp(y.data(), alone.data(), y.size() * sizeof(float)) != 0) {
            Case::Fail("the number of threads changed a bit");
          }
        }
      }
      RunFromInside(two, *cases, variant);
      RunFromInside(eight, *cases, variant);
    }
    std::printf("%s\n", pk::kVariantNames[variant]);
  }
  return 0;
}
