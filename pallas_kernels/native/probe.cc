// A handler that streams through a buffer: it shows that calls work, and what reading can cost at best.
#include <string>
#include <vector>

#include "pallas_kernels/native/cpu_features.h"
#include "pallas_kernels/native/export.h"
#include "pallas_kernels/native/parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pk {

PK_DECLARE_VARIANTS(uint32_t SumWords(const uint32_t* words, int64_t count))

namespace {

constexpr int64_t kChunkWords = 1 << 16;

// Sums the words modulo 2^32, so that the order of the sum is no question.
ffi::Error Probe(ffi::ThreadPool pool, ffi::Buffer<ffi::U32> words,
                 ffi::ResultBuffer<ffi::U32> sum, int64_t forced, int64_t max_threads) {
  const int variant = ChosenVariant(forced);
  if (variant < 0) return ffi::Error::InvalidArgument("this processor cannot run that variant");
  if (sum->element_count() != 1) return ffi::Error::InvalidArgument("the sum is one number");
  auto* sum_words = PK_PICK(SumWords, variant);
  const int64_t count = static_cast<int64_t>(words.element_count());
  std::atomic<uint32_t> total{0};
  ParallelRanges(pool, count, (count + kChunkWords - 1) / kChunkWords,
                 [&](int64_t begin, int64_t end) {
                   total += sum_words(words.typed_data() + begin, end - begin);
                 },
                 max_threads);
  *sum->typed_data() = total.load();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pk

PK_EXPORT const char* pk_source_digest() { return PK_SOURCE_DIGEST; }

// The names of the variants that can run here, separated by blanks, best last.
PK_EXPORT const char* pk_variants() {
  static const std::string names = [] {
    std::string all;
    for (int variant = 0; variant < pk::kNumVariants; ++variant) {
      if (pk::CanRun(variant)) all += std::string(all.empty() ? "" : " ") + pk::kVariantNames[variant];
    }
    return all;
  }();
  return names.c_str();
}

PK_HANDLER(PkProbe, pk::Probe,
           ffi::Ffi::Bind()
               .Ctx<ffi::ThreadPool>()
               .Arg<ffi::Buffer<ffi::U32>>()
               .Ret<ffi::Buffer<ffi::U32>>()
               .Attr<int64_t>("variant")
               .Attr<int64_t>("max_threads"));
