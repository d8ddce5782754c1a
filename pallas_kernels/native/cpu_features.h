// Which compiled variant of a kernel this processor can run, decided once per process.
//
// A handler writes
//
//   namespace portable { Error Kernel(...); }         // declared by PK_DECLARE_VARIANTS
//   auto* kernel = PK_PICK(Kernel, ChosenVariant(forced));
//
// where `forced` is -1, or the index of a variant that a test asks for.
#ifndef PALLAS_KERNELS_NATIVE_CPU_FEATURES_H_
#define PALLAS_KERNELS_NATIVE_CPU_FEATURES_H_

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pk {

enum Variant : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };
constexpr int kNumVariants = 4;
constexpr const char* kVariantNames[kNumVariants] = {"portable", "avx2", "avx512", "avx512bf16"};

inline bool IsCompiled(int variant) {
  switch (variant) {
    case kPortable:
      return true;
#if defined(PK_HAS_AVX2)
    case kAvx2:
      return true;
#endif
#if defined(PK_HAS_AVX512)
    case kAvx512:
      return true;
#endif
#if defined(PK_HAS_AVX512BF16)
    case kAvx512Bf16:
      return true;
#endif
    default:
      return false;
  }
}

#if defined(__x86_64__)
struct CpuidLeaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  CpuidLeaf(uint32_t leaf, uint32_t subleaf) {
    __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx);
  }
};

// The register states that the operating system saves: an instruction set without them is unusable.
inline uint64_t SavedStates() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

inline int DetectVariant() {
  const auto has = [](uint32_t reg, int bit) { return (reg >> bit & 1) != 0; };
  const CpuidLeaf basic(1, 0), extended(7, 0), more(7, 1);
  if (!has(basic.ecx, 27)) return kPortable;  // OSXSAVE
  const uint64_t saved = SavedStates();
  const bool fma = has(basic.ecx, 12), f16c = has(basic.ecx, 29), avx2 = has(extended.ebx, 5);
  if ((saved & 0x6) != 0x6 || !fma || !f16c || !avx2) return kPortable;
  const bool f = has(extended.ebx, 16), dq = has(extended.ebx, 17), bw = has(extended.ebx, 30);
  const bool vl = has(extended.ebx, 31), vnni = has(extended.ecx, 11);
  if ((saved & 0xe6) != 0xe6 || !f || !dq || !bw || !vl || !vnni) return kAvx2;
  return has(more.eax, 5) ? kAvx512Bf16 : kAvx512;
}
#else
inline int DetectVariant() { return kPortable; }
#endif

// Whether a variant is in this binary and runs on this processor.
inline bool CanRun(int variant) {
  static const int best = DetectVariant();
  return variant >= 0 && variant <= best && IsCompiled(variant);
}

// The variant to run: `forced`, or for -1 the best there is. Returns -1 if `forced` cannot run.
inline int ChosenVariant(int64_t forced) {
  if (forced >= 0) return forced < kNumVariants && CanRun(static_cast<int>(forced)) ? forced : -1;
  int best = kPortable;
  for (int variant = 0; variant < kNumVariants; ++variant) {
    if (CanRun(variant)) best = variant;
  }
  return best;
}

}  // namespace pk

// Declares a kernel of every compiled variant, e.g. PK_DECLARE_VARIANTS(void Sum(const float*, int64_t)).
#if defined(PK_HAS_AVX2)
#define PK_IF_AVX2(...) __VA_ARGS__
#else
#define PK_IF_AVX2(...)
#endif
#if defined(PK_HAS_AVX512)
#define PK_IF_AVX512(...) __VA_ARGS__
#else
#define PK_IF_AVX512(...)
#endif
#if defined(PK_HAS_AVX512BF16)
#define PK_IF_AVX512BF16(...) __VA_ARGS__
#else
#define PK_IF_AVX512BF16(...)
#endif

#define PK_DECLARE_VARIANTS(...)                       \
  namespace portable {                                 \
  __VA_ARGS__;                                         \
  }                                                    \
  PK_IF_AVX2(namespace avx2 { __VA_ARGS__; })          \
  PK_IF_AVX512(namespace avx512 { __VA_ARGS__; })      \
  PK_IF_AVX512BF16(namespace avx512bf16 { __VA_ARGS__; })

// The address of the chosen variant of a kernel that PK_DECLARE_VARIANTS declared in this scope.
#define PK_PICK(name, variant)                                             \
  ([](int chosen) -> decltype(&portable::name) {                           \
    switch (chosen) {                                                      \
      PK_IF_AVX2(case ::pk::kAvx2 : return &avx2::name;)                   \
      PK_IF_AVX512(case ::pk::kAvx512 : return &avx512::name;)             \
      PK_IF_AVX512BF16(case ::pk::kAvx512Bf16 : return &avx512bf16::name;) \
      default:                                                             \
        return &portable::name;                                            \
    }                                                                      \
  }(variant))

#endif  // PALLAS_KERNELS_NATIVE_CPU_FEATURES_H_
