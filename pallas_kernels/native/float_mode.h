// Gives every chunk the same rounding and the same treatment of denormals, on whatever thread it
// runs: XLA's pool threads flush denormals, and a caller's own thread may not.
#ifndef PALLAS_KERNELS_NATIVE_FLOAT_MODE_H_
#define PALLAS_KERNELS_NATIVE_FLOAT_MODE_H_

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pk {

// While it lives: round to nearest even, denormals are zero, no traps.
class ScopedFloatMode {
 public:
#if defined(__x86_64__)
  ScopedFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }  // FTZ, DAZ, all traps masked
  ~ScopedFloatMode() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  ScopedFloatMode() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{1} << 24));  // FZ
  }
  ~ScopedFloatMode() { __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{saved_})); }
#else
  ScopedFloatMode() : saved_(0) {}
#endif
  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;

 private:
#if defined(__aarch64__)
  uint64_t saved_;
#else
  [[maybe_unused]] uint32_t saved_;
#endif
};

}  // namespace pk

#endif  // PALLAS_KERNELS_NATIVE_FLOAT_MODE_H_
