// The processor's rounding mode while kernels compute.
#pragma once

#include <cfenv>

namespace outrider {

// A scope in which the thread rounds to nearest and keeps subnormal numbers. Loading a library
// that was compiled with -ffast-math sets the loading thread to flush them to zero, so that a
// row's bits would depend on the member of the team that computes it.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&found_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&found_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t found_;
};

}  // namespace outrider
