// Announces a step's products and looks at what a helper would read while it waits. Exits with 1 when
// that is anything but the product that came next in the step before.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "pallas_kernels/native/read_ahead.h"

namespace {

void Expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

int64_t Pieces() {
  pk::internal::ReadAhead ahead;
  int64_t pieces = 0;
  while (ahead.Next()) ++pieces;
  return pieces;
}

struct Product {
  std::vector<char> weights, scales;
  Product(int64_t pieces) : weights(pieces * pk::internal::kPiece), scales(64) {}
  void Announce() const {
    pk::Announce({{weights.data(), static_cast<int64_t>(weights.size())},
                  {scales.data(), static_cast<int64_t>(scales.size())},
                  {}});
  }
};

}  // namespace

int main() {
  const int64_t most = pk::internal::MostAhead() / pk::internal::kPiece;
  Expect(most > 8, "a second cache holds less than 16 KiB");
  Expect(Pieces() == 0, "something was read before anything was announced");
  const Product small(3), middle(7), huge(2 * most);
  const Product* const step[] = {&small, &middle, &huge, &small, &huge};
  const Product* const next[] = {&middle, &huge, &small, &huge, &small};
  for (const Product* product : step) product->Announce();
  // The same product twice in a step: the latest successor is the guess.
  const int64_t known[] = {-1, most, 3, -1, 3};
  for (int i = 0; i < 5; ++i) {
    step[i]->Announce();
    const int64_t pieces = Pieces();
    if (known[i] < 0) continue;
    const int64_t size = static_cast<int64_t>(next[i]->weights.size()) / pk::internal::kPiece;
    Expect(pieces <= size, "more was read than there is");
    Expect(pieces >= known[i] && pieces <= known[i] + 1, "the next product was not read ahead");
  }
  pk::Announce({});
  Expect(Pieces() == 0, "something is read though nothing is known of what comes next");
  std::puts("read ahead");
  return 0;
}
