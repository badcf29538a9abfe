// Number formats and the vector type of this instruction path.
//
// A library is compiled for each instruction path (see ../compiler.py), and a process loads
// only one of them, so the compiler's flags choose the path, never a test at run time.
// Everything here has internal linkage for the same reason.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace outrider {

// Output features of a panel, the unit of packed matrices.
constexpr int kPanel = 16;

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#else
constexpr int kWidth = 8;
#endif
constexpr int kVectorsPerPanel = kPanel / kWidth;

// Whether products of bfloat16 have the bits of AVX512-BF16's instruction, with or without that instruction: the upper
// product of a pair is added first, each addition is rounded once, and subnormal numbers count as zeros.
constexpr bool kHasBitsOfDotProducts = kWidth == 16;

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));

// The same types in memory, at any address. (memcpy would copy through the stack.)
typedef float FloatsInMemory __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef uint32_t WordsInMemory __attribute__((vector_size(kWidth * 4), aligned(2), may_alias));

#if defined(__AVX512F__)
constexpr Ints kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
constexpr Ints kLanes = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

struct BFloat16 {
  uint16_t bits;
};
static_assert(sizeof(BFloat16) == 2);

static inline Floats broadcast(float value) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(value);
#elif defined(__AVX2__)
  return _mm256_set1_ps(value);
#else
  return Floats{} + value;
#endif
}

static inline Floats load(const float* from) { return *reinterpret_cast<const FloatsInMemory*>(from); }

static inline void store(float* to, Floats value) { *reinterpret_cast<FloatsInMemory*>(to) = value; }

// Returns a * b + c, rounded once; computed by the C library if the processor cannot, so that a path has the
// same bits on every machine. Contraction is off in the flags and the operation is explicit here, because an
// expression must round the same way wherever the compiler unrolls it.
static inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  Floats sum;
  for (int i = 0; i < kWidth; i++) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return sum;
#endif
}

// These are one instruction each on x86, in this form. They return b if a or b is NaN.
static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
static inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

// Combines the upper half of the lanes with the lower one, then the halves of the result, until one lane is left. The
// compiler makes shuffles of it; loops over lanes would go through memory.
template <class Combine>
static inline float folded(Floats lanes, Combine&& combine) {
  typedef float Four __attribute__((vector_size(16)));
  typedef float Eight __attribute__((vector_size(32)));
  Eight eight;
#if defined(__AVX512F__)
  Eight halves[2];
  std::memcpy(halves, &lanes, sizeof halves);
  eight = combine(halves[0], halves[1]);
#else
  eight = lanes;
#endif
  Four quarters[2];
  std::memcpy(quarters, &eight, sizeof quarters);
  const Four four = combine(quarters[0], quarters[1]);
  const Four two = combine(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
  const Four one = combine(two, __builtin_shufflevector(two, two, 1, 0, 3, 2));
  return one[0];
}

// Returns the sum of all lanes, always in the same order.
static inline float sum_of_lanes(Floats value) {
  return folded(value, [](auto lower, auto upper) { return lower + upper; });
}

static inline float largest_of_lanes(Floats value) {
  return folded(value, [](auto lower, auto upper) { return lower > upper ? lower : upper; });
}

// ---- bfloat16: the upper half of a float32, rounded to nearest, ties to even.

static inline float widen(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

static inline float widen(float value) { return value; }

static inline BFloat16 round_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return BFloat16{static_cast<uint16_t>((bits >> 16) | 0x40)};  // remains a NaN
  return BFloat16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

static inline Floats rounded_to_bfloat16(Floats value) {  // the result is float32
  const Words bits = reinterpret_cast<Words>(value);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
  const Words not_a_number = (bits & 0xffff0000) | 0x00400000;
  return reinterpret_cast<Floats>(value == value ? rounded : not_a_number);
}

// Loads kWidth consecutive values as float32.
static inline Floats load_wide(const float* from) { return load(from); }

static inline Floats load_wide(const BFloat16* from) {
#if defined(__AVX512F__)
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16));
#elif defined(__AVX2__)
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16));
#else
  Floats wide;
  for (int i = 0; i < kWidth; i++) wide[i] = widen(from[i]);
  return wide;
#endif
}

// Loads kWidth consecutive float16 as float32, exactly.
static inline Floats load_halves(const void* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#else
  uint16_t halves[kWidth];
  std::memcpy(halves, from, sizeof halves);
  Words bits;
  for (int i = 0; i < kWidth; i++) bits[i] = static_cast<uint32_t>(halves[i] & 0x7fff) << 13;
  const Floats magnitude = bits < 0x0f800000 ? reinterpret_cast<Floats>(bits) * 0x1p112f
                                             : reinterpret_cast<Floats>(bits | 0x7f800000);  // infinite or NaN
  for (int i = 0; i < kWidth; i++) bits[i] = static_cast<uint32_t>(halves[i] & 0x8000) << 16;
  return reinterpret_cast<Floats>(reinterpret_cast<Words>(magnitude) | bits);
#endif
}

static inline void store_one(float* to, float value) { *to = value; }
static inline void store_one(BFloat16* to, float value) { *to = round_to_bfloat16(value); }

static inline void store_rounded(float* to, Floats value) { store(to, value); }

// Stores the upper halves of floats, which are bfloat16.
static inline void store_upper_halves(BFloat16* to, Words floats) {
  const Words bits = floats >> 16;
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(bits)));
#elif defined(__AVX2__)
  const __m256i wide = reinterpret_cast<__m256i>(bits);
  const __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow);
#else
  for (int i = 0; i < kWidth; i++) to[i].bits = static_cast<uint16_t>(bits[i]);
#endif
}

static inline void store_rounded(BFloat16* to, Floats value) {
  store_upper_halves(to, reinterpret_cast<Words>(rounded_to_bfloat16(value)));
}

// Stores values that were already rounded to the type.
static inline void store_exact(float* to, Floats value) { store(to, value); }
static inline void store_exact(BFloat16* to, Floats value) { store_upper_halves(to, reinterpret_cast<Words>(value)); }

// Rounds to T, with the same result as storing and loading, but in registers.
static inline Floats rounded_to(Floats value, const float*) { return value; }
static inline Floats rounded_to(Floats value, const BFloat16*) { return rounded_to_bfloat16(value); }

// Loads 2 * kWidth consecutive bfloat16 as two vectors: those with even indices, and those with odd ones.
static inline void load_pairs(const BFloat16* from, Floats& even, Floats& odd) {
  const Words pairs = *reinterpret_cast<const WordsInMemory*>(from);
  even = reinterpret_cast<Floats>(pairs << 16);
  odd = reinterpret_cast<Floats>(pairs & 0xffff0000);
}

// ---- functions of a vector

// Returns e^x, accurate to about one unit in the last place (Cephes' expf); 0 below -87.3.
static inline Floats exponential(Floats x) {
  const Floats lowest = broadcast(-87.3f), highest = broadcast(88.0f);
  const auto is_zero = x < lowest;
  x = smaller(highest, larger(lowest, x));
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
  const Floats shift = broadcast(12582912.0f);
  const Floats shifted = multiply_add(x, broadcast(1.44269504088896f), shift);
  const Floats n = shifted - shift;
  Floats r = multiply_add(n, broadcast(-0.693359375f), x);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = multiply_add(p, r, broadcast(1.3981999507e-3f));
  p = multiply_add(p, r, broadcast(8.3334519073e-3f));
  p = multiply_add(p, r, broadcast(4.1665795894e-2f));
  p = multiply_add(p, r, broadcast(1.6666665459e-1f));
  p = multiply_add(p, r, broadcast(5.0000001201e-1f));
  p = multiply_add(p, r * r, r + 1.0f);
  const Words exponent = (reinterpret_cast<Words>(shifted) + (127u - 0x4b400000u)) << 23;
  const Floats power = reinterpret_cast<Floats>(exponent);
  return is_zero ? Floats{} : p * power;
}

static inline float exponential(float x) { return exponential(broadcast(x))[0]; }

static inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// The tanh approximation of GELU (Hendrycks and Gimpel, 2016), since (1 + tanh(x)) / 2 = sigmoid(2x).
static inline Floats gelu(Floats x) {
  return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));  // the factor is sqrt(8 / pi)
}

static inline Floats hyperbolic_tangent(Floats x) {
  const Floats e = exponential(x * -2.0f);
  return (1.0f - e) / (1.0f + e);
}

}  // namespace outrider
