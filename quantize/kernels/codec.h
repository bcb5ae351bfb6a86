// The arithmetic of phasefold's formats, for one value or for a vector of values.
//
// Every function is a template over the lane type: F is float on a GPU thread and in scalar code, or a vector of floats
// whose operators work lane by lane (lanes.h), so that the CPU and the GPU run the same expressions. Nothing is
// included here, so NVRTC can compile it, and there is no include guard: cpu.cpp includes it once for each instruction
// set, inside a namespace of its own. Sources: OCP 8-bit floating point (e4m3), OCP microscaling 1.0 (e2m1, e8m0),
// compressed-tensors (pack-quantized). The torch twin (twin.py) is the oracle, bit for bit; no step may be contracted
// into an FMA by the compiler (-ffp-contract=off, nvrtc --fmad=false), those that are meant are spelled out.

#ifdef __CUDACC__
#define PHASEFOLD_INLINE __device__ __forceinline__
#else
#define PHASEFOLD_INLINE inline __attribute__((always_inline))
#endif

typedef unsigned int u32;

// ---- one lane

#ifdef __CUDACC__
PHASEFOLD_INLINE u32 bits(float x) { return __float_as_uint(x); }
PHASEFOLD_INLINE float as_float(u32 u) { return __uint_as_float(u); }
PHASEFOLD_INLINE float root(float x) { return __fsqrt_rn(x); }
PHASEFOLD_INLINE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
PHASEFOLD_INLINE float half_value(unsigned short code) {  // f16_value in one instruction
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(code));
  return x;
}
#else
PHASEFOLD_INLINE u32 bits(float x) {
  u32 u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}

PHASEFOLD_INLINE float as_float(u32 u) {
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}

PHASEFOLD_INLINE float root(float x) { return __builtin_sqrtf(x); }
PHASEFOLD_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif

PHASEFOLD_INLINE float select(bool mask, float yes, float no) { return mask ? yes : no; }
PHASEFOLD_INLINE u32 select(bool mask, u32 yes, u32 no) { return mask ? yes : no; }
PHASEFOLD_INLINE u32 larger(u32 a, u32 b) { return a > b ? a : b; }
PHASEFOLD_INLINE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

// x * inverse + int4_magic, rounded once; x - q * scale, where the product is exact: fused or not is the same.
PHASEFOLD_INLINE float biased_product(float x, float inverse) { return fused(x, inverse, 12582920.0f); }
#ifdef __CUDACC__
PHASEFOLD_INLINE float minus_exact_product(float x, float q, float scale) { return fused(-q, scale, x); }
#else
PHASEFOLD_INLINE float minus_exact_product(float x, float q, float scale) { return x - q * scale; }
#endif

#ifdef __CUDACC__
PHASEFOLD_INLINE float absolute(float x) { return fabsf(x); }  // costs nothing there: operands have it built in
#endif

template <class F>
PHASEFOLD_INLINE F absolute(F x) {
  return as_float(bits(x) & 0x7fffffffu);
}

template <class F>
PHASEFOLD_INLINE F splat(float x) {
  return F{} + x;
}

template <class U>
PHASEFOLD_INLINE U fill(U, u32 x) {  // as many lanes as the first argument has
  return U{} + x;
}

// ---- decoding

// Magnitude bits of a small float with M mantissa bits and exponent bias B -> its value. A subnormal is read as a
// normal number of the next exponent from which its hidden bit is then taken off: exact, and no float32 denormal is
// touched (those cost a microcode assist on x86). Infinities and NaN are not known here: e4m3's NaN (127) reads as 480.
template <int M, int B, class U>
PHASEFOLD_INLINE auto small_float(U magnitude) {
  auto subnormal = magnitude < (1u << M);
  U shifted = (magnitude << (23 - M)) + (u32)((127 - B) << 23);
  auto hidden = as_float(select(subnormal, U{} + (u32)((128 - B) << 23), U{}));
  return as_float(select(subnormal, shifted + (1u << 23), shifted)) - hidden;
}

template <class U>
PHASEFOLD_INLINE auto e4m3_value(U code) {
  return as_float(bits(small_float<3, 7>(code & 0x7fu)) | ((code & 0x80u) << 24));
}

template <class U>
PHASEFOLD_INLINE auto f16_value(U code) {
  auto magnitude = code & 0x7fffu;
  auto special = select(magnitude >= 0x7c00u, fill(code, 0x7f800000u), fill(code, 0u));  // infinity and NaN stay so
  return as_float(bits(small_float<10, 15>(magnitude)) | special | ((code & 0x8000u) << 16));
}

#ifndef __CUDACC__
PHASEFOLD_INLINE float half_value(unsigned short code) { return f16_value((u32)code); }
#endif

template <class U>
PHASEFOLD_INLINE auto e2m1_value(U code) {
  return as_float(bits(small_float<1, 1>(code & 7u)) | ((code & 8u) << 28));
}

// Offset-binary nibble 0..15 -> -8..7, through the float 2^23 + nibble.
template <class U>
PHASEFOLD_INLINE auto int4_value(U nibble) {
  return as_float(nibble | 0x4b000000u) - 8388616.0f;
}

// OCP E8M0: 2^(code - 127); 255 is NaN.
PHASEFOLD_INLINE float e8m0_value(u32 code) {
  return as_float(code == 255 ? 0x7fc00000u : code == 0 ? 0x00400000u : code << 23);
}

// ---- rounding

// Finite float32 -> the BF16 that is nearest, ties to even, as the upper half of the result (the lower half is zero).
template <class U>
PHASEFOLD_INLINE U bf16_bits(U u) {
  return (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
}

// x -> e4m3fn, nearest, ties to even, saturating at 448: the code is the low byte of the result (what lies above it is
// to be cut off); *magnitude becomes that of the chosen value.
// Adding 2^(e + 20) to a number of exponent e leaves it rounded to three mantissa bits in the low bits of the sum;
// holding e at -6 or above makes the steps of subnormals even (2^-9). The magic number's own low bits, and the exponent
// shifted to where a code has it, put in the bias: 8 (e + 6) = (exponent >> 20) + 0x38 modulo 256.
// Where |x| is known to be below 464, as under a scale made from amax, `saturate` is not needed.
template <bool saturate, class F>
PHASEFOLD_INLINE auto e4m3_code(F x, F* magnitude) {
  auto u = bits(x);
  auto clamped = u & 0x7fffffffu;
  if (saturate) clamped = smaller(clamped, fill(u, 0x43e00000u));
  auto exponent = larger(clamped & 0x7f800000u, fill(u, 0x3c800000u));
  F magic = as_float(exponent + ((20u << 23) + 0x38u));
  F sum = (saturate ? as_float(clamped) : absolute(x)) + magic;
  *magnitude = sum - magic;
  return (bits(sum) + (exponent >> 20)) | ((u >> 24) & 0x80u);
}

// x / scale, rounded once. `fast` corrects x * inverse by its remainder. With a BF16 scale this equals the division bit
// for bit: the product of 24 and 8 bits cancels x down to a dozen bits, so the remainder is exact and the corrected
// quotient is off by less than 2^-20 ulp before its one rounding, while x / scale stays at least 2^-9 ulp away from a
// midpoint of floats (8-bit divisor; on a midpoint x would have 25 bits or more). Scales between 2^-100 and 2^100 keep
// all that can decide a code out of the denormals.
template <bool fast, class F>
PHASEFOLD_INLINE F quotient(F x, F scale, F inverse) {
  if (!fast) return x / scale;
  F near = x * inverse;
  return fused(fused(-near, scale, x), inverse, near);
}

// x / scale, rounded once, for any scale whose inverse is correctly rounded: the second step begins within an ulp of the
// quotient, from where one correction by the exact remainder ends at the nearest float (Markstein 1990, "Computation of
// elementary functions on the IBM RISC System/6000"). Nothing on the way may be denormal that can decide a code. The
// remainder of a zero has lost its sign: it is x's.
template <class F>
PHASEFOLD_INLINE F divided(F x, F scale, F inverse) {
  F near = x * inverse;
  near = fused(fused(-near, scale, x), inverse, near);
  near = fused(fused(-near, scale, x), inverse, near);
  return as_float((bits(near) & 0x7fffffffu) | (bits(x) & 0x80000000u));
}

// INT4: a quotient below 2^21 -> nearest integer, ties to even, clamped to -8..7, as the float 1.5 * 2^23 + 8 + q: its
// low four bits are the stored nibble. Positive floats sort like their bits, so the clamp is done on these.
constexpr float int4_magic = 12582920.0f;

template <class F>
PHASEFOLD_INLINE F int4_clamped(F biased) {
  return as_float(smaller(larger(bits(biased), fill(bits(biased), 0x4b400000u)), fill(bits(biased), 0x4b40000fu)));
}

template <class F>
PHASEFOLD_INLINE F int4_biased(F v) {
  return int4_clamped(v + int4_magic);
}

// ---- scales

// amax of an e4m3 block -> scale: fl(amax / 448), or the power of two at or above it; at least 2^-126; 1 for zeros.
template <class F>
PHASEFOLD_INLINE F e4m3_scale(F amax, bool power_of_two) {
  auto u = bits(amax / 448.0f);
  if (power_of_two) u = (u + 0x7fffffu) & 0x7f800000u;
  u = larger(u, fill(u, 0x00800000u));
  return as_float(select(amax == 0.0f, fill(u, 0x3f800000u), u));
}

// amax of an INT4 group -> BF16 scale, nearest to fl(amax / divisor); never 0 for a group that is not; 1 for zeros.
template <class F>
PHASEFOLD_INLINE F int4_scale(F amax, float divisor) {
  auto u = larger(bf16_bits(bits(amax / divisor)), fill(bits(amax), 0x00010000u));
  return as_float(select(amax == 0.0f, fill(u, 0x3f800000u), u));
}

// ---- search (quantize/mse.py tells how the divisors were chosen; the first is RTN's and wins ties)

constexpr int num_divisors = 9;
// amax of the groups that are searched, 2^-60 to 2^60, as bits: beyond it squares would over- or underflow, RTN is taken
constexpr u32 search_low = 0x21800000u, search_high = 0x5d800000u;

PHASEFOLD_INLINE constexpr float divisor(int i) {
  constexpr float divisors[num_divisors] = {7.5f, 7.0f, 7.25f, 7.75f, 8.0f, 8.25f, 8.5f, 8.75f, 9.25f};
  return divisors[i];
}

// Weight of an element's squared error; objective 0: sqrt(sigma2 + x2), 1: sigma2 + x2, 2: one.
template <class F>
PHASEFOLD_INLINE F element_weight(F x, F sigma2, int objective) {
  F sum = sigma2 + x * x;
  return objective == 0 ? root(sum) : objective == 1 ? sum : splat<F>(1.0f);
}

// Weighted squared error of one element under the scale amax / divisor. The code is the integer nearest to the exact
// product x * inverse (biased_product rounds once); where that is not the one nearest to x / scale, both are equally
// near to 2^-22. q * scale is exact (4 x 8 bits), so the fused form equals x - q * scale; the products after it are
// rounded one by one. |x| <= divided_by * scale * (1 + 2^-8) tells on which side a code needs no clamp.
template <class F>
PHASEFOLD_INLINE F search_term(F x, F weight, F scale, F inverse, float divided_by) {
  F biased = biased_product(x, inverse);
  auto u = bits(biased);
  if (divided_by > 8.4f) u = larger(u, fill(u, 0x4b400000u));
  if (divided_by > 7.4f) u = smaller(u, fill(u, 0x4b40000fu));
  F error = minus_exact_product(x, as_float(u) - int4_magic, scale);
  return error * error * weight;
}

// ---- inverse (quantize/inverse.py): the scales tried for a group are amax / 7, / 8, / 6, / 5 ... / 1, each as it is, one
// BF16 ulp below and one above.

constexpr int num_inverse_levels = 8;

PHASEFOLD_INLINE constexpr float inverse_level(int i) { return i == 0 ? 7.0f : i == 1 ? 8.0f : 8.0f - (float)i; }

// Difference in bits between x and bf16(q * scale), where q is x's code; 0 where they are equal or both are zero.
template <class F>
PHASEFOLD_INLINE auto inverse_mismatch(F x, F scale) {
  F q = int4_biased(x / scale) - int4_magic;
  auto difference = bits(x) ^ bf16_bits(bits(q * scale));
  return select(((bits(x) | bits(q)) << 1) == 0u, fill(difference, 0u), difference);
}
