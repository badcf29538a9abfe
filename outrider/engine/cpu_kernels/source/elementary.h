// Logarithm and exponential in which every step is one operation that IEEE 754 rounds: addition,
// subtraction and multiplication of float32, in a fixed order and never contracted. They give the
// same bits as ../../sampler/elementary.py on any machine, so races and filters are decided alike
// everywhere. Both are accurate to one unit in the last place (polynomials of Cephes' logf, expf).
#pragma once

#include "numbers.h"

namespace outrider {

// Returns log(sum + rest). `sum` is positive and normal, and |rest| at most half a unit in its last place.
static inline Floats logarithm_of_sum(Floats sum, Floats rest) {
  const Ints bits = reinterpret_cast<Ints>(sum);
  const Ints exponent = (bits - 0x3f3504f3) >> 23;  // so that the mantissa is in [sqrt(1/2), sqrt(2))
  const Floats mantissa = reinterpret_cast<Floats>(bits - (exponent << 23));
  const Floats scale = reinterpret_cast<Floats>((127 - exponent) << 23);
  const Floats f = (mantissa - 1.0f) + rest * scale;
  Floats p = broadcast(7.0376836292e-2f);
  p = p * f + -1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f + -1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f + -1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f + -2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const Floats z = f * f;
  const Floats n = __builtin_convertvector(exponent, Floats);
  Floats y = (f * z) * p;
  y = y + n * -2.12194440e-4f;
  y = y - z * 0.5f;
  return (f + y) + n * 0.693359375f;
}

static inline Floats logarithm(Floats value) { return logarithm_of_sum(value, Floats{}); }

// Returns e^x * 2^44 for x <= 0. x is raised to at least -32; smaller values round to a mass of 0.
static inline Floats scaled_exponential(Floats x) {
  const Floats lowest = broadcast(-32.0f);
  x = x > lowest ? x : lowest;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
  const Floats shifted = x * 1.44269504088896f + 12582912.0f;
  const Floats n = shifted - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const Words power = (reinterpret_cast<Words>(shifted) + (127u + 44u - 0x4b400000u)) << 23;
  return p * reinterpret_cast<Floats>(power);
}

}  // namespace outrider
