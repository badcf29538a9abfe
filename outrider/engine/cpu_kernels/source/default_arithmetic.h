// How the processor rounds while kernels compute.
#pragma once

#include <cfenv>

namespace outrider {

// Rounds to nearest and keeps subnormal numbers, whatever the thread was set to. A library
// that is compiled with -ffast-math makes the thread that loads it flush them to zero: then
// a row's bits would depend on which member of the team computes it.
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
