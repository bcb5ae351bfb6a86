// CPU kernels behind a plain C ABI: convert, check and compare row blocks of stored matrices.
//
// The loops (decode.h, int4.h, encode.h, measure.h) are compiled once for each instruction set, each in a namespace of
// its own, and the caller names the level that it wants; phasefold_level() is the best one that this CPU runs. Every
// level gives the same bits (tests/test_kernels.py holds all of them against the torch twin). No state, no allocation:
// any number of threads may call. Scratch is some tens of KB on the stack.
//
// Not GCC's target_clones: tests could not choose a clone, and the preprocessor would not know what one may use.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <initializer_list>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define PHASEFOLD_X86 1
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"    // vectors are passed only between functions that are inlined
#pragma GCC diagnostic ignored "-Wunused-function"

#include "kinds.h"

extern "C" {

// A row block of a stored matrix. `block_rows` x `block_cols` elements share a scale (quantized kinds only).
struct Matrix {
  int32_t kind, scale_kind;
  int64_t rows, cols, block_rows, block_cols;
  const uint8_t* codes;
  const uint8_t* scales;
};

// What it becomes. Scales are float32 for e4m3 and BF16 for INT4. `column_weights`: optional float32 [cols], multiplied
// into the error weights of the search.
struct Target {
  int32_t kind, method, objective, power_of_two;
  int64_t block_rows, block_cols;
  uint8_t* codes;
  uint8_t* scales;
  const float* column_weights;
};

struct Report {
  int64_t fault, row, column, tiny_scales, zero_blocks, negative_zeros;
  double error2, norm2, max_error;
};
}

#define LANES 4
namespace plain {
#include "lanes.h"
#include "codec.h"
#include "decode.h"
#include "sums.h"
#include "int4.h"
#include "encode.h"
#include "measure.h"
}  // namespace plain
#undef LANES

#ifdef PHASEFOLD_X86
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define LANES 8
namespace avx2 {
#include "lanes.h"
#include "codec.h"
#include "decode.h"
#include "sums.h"
#include "int4.h"
#include "encode.h"
#include "measure.h"
}  // namespace avx2
#undef LANES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define LANES 16
namespace avx512 {
#include "lanes.h"
#include "codec.h"
#include "decode.h"
#include "sums.h"
#include "int4.h"
#include "encode.h"
#include "measure.h"
}  // namespace avx512
#undef LANES
#pragma GCC pop_options
#endif

namespace {

using namespace plain;

struct Level {
  bool (*convert)(const Matrix&, const Target&, Report&);
  bool (*check)(const Matrix&, Report&);
  bool (*compare)(const Matrix&, const Matrix&, Report&);
};

const Level levels[] = {
    {plain::convert, plain::check, plain::compare},
#ifdef PHASEFOLD_X86
    {avx2::convert, avx2::check, avx2::compare},
    {avx512::convert, avx512::check, avx512::compare},
#endif
};

bool block_is_zero(const Matrix& m, int64_t block_row, int64_t block_column) {
  for (int64_t row = block_row * m.block_rows; row < (block_row + 1) * m.block_rows && row < m.rows; row++)
    for (int64_t c = block_column * m.block_cols; c < (block_column + 1) * m.block_cols && c < m.cols; c++)
      if (code_value(m.kind, m.codes, row * m.cols + c) != 0.0f) return false;
  return true;
}

// The first scale that is NaN or infinite, negative, or zero over codes that are not; counts denormal ones.
bool scales_are_good(const Matrix& m, Report& report) {
  if (m.kind < kE4M3) return true;
  const int64_t rows = scale_rows(m), columns = scale_columns(m);
  for (int64_t i = 0; i < rows * columns; i++) {
    const float scale = scale_value(m.scale_kind, m.scales, i);
    const u32 magnitude = bits(scale) & 0x7fffffffu;
    if (bits(scale) - 0x00800000u < 0x7f000000u) continue;  // positive, normal, finite
    report.row = i / columns;
    report.column = i % columns;
    if (magnitude >= 0x7f800000u) report.fault = kScale;
    else if (scale < 0.0f) report.fault = kNegative;
    else if (magnitude == 0 && !block_is_zero(m, report.row, report.column)) report.fault = kZeroScale;
    if (report.fault) {
      report.tiny_scales = 0;
      return false;
    }
    report.tiny_scales += magnitude != 0;
  }
  report.row = report.column = 0;
  return true;
}

float value(const Matrix& m, int64_t row, int64_t column) {
  const float code = code_value(m.kind, m.codes, row * m.cols + column);
  if (m.kind < kE4M3) return code;
  const int64_t block = row / m.block_rows * scale_columns(m) + column / m.block_cols;
  return code * scale_value(m.scale_kind, m.scales, block);
}

// The first weight whose magnitude's bits reach `bound`: 0x7f800000 is infinity.
bool find(const Matrix& m, uint32_t bound, Fault fault, Report& report) {
  for (int64_t row = 0; row < m.rows; row++)
    for (int64_t column = 0; column < m.cols; column++)
      if ((bits(value(m, row, column)) & 0x7fffffffu) >= bound) {
        report = Report{fault, row, column, 0, 0, 0, 0, 0, 0};
        return true;
      }
  return false;
}

}  // namespace

extern "C" {

int phasefold_level() {
#ifdef PHASEFOLD_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  return avx2 ? avx512 ? 2 : 1 : 0;
#else
  return 0;
#endif
}

// Faults are looked for in this order: scales, weights, then what the target cannot hold; each in row-major order.
void phasefold_convert(int level, const Matrix* m, const Target* t, Report* report) {
  *report = Report{};
  if (!scales_are_good(*m, *report)) return;
  if (levels[level].convert(*m, *t, *report)) return;
  const Report found = *report;
  if (find(*m, 0x7f800000u, kWeight, *report) || find(*m, 0x7f7f8000u, kOverflow, *report)) return;
  *report = Report{found.fault, found.row, found.column, 0, 0, 0, 0, 0, 0};
}

void phasefold_check(int level, const Matrix* m, Report* report) {
  *report = Report{};
  if (scales_are_good(*m, *report) && !levels[level].check(*m, *report)) find(*m, 0x7f800000u, kWeight, *report);
}

void phasefold_compare(int level, const Matrix* a, const Matrix* b, Report* report) {
  *report = Report{};
  if (!scales_are_good(*a, *report) || !scales_are_good(*b, *report)) return;
  report->tiny_scales = 0;
  if (levels[level].compare(*a, *b, *report)) return;
  if (!find(*a, 0x7f800000u, kWeight, *report)) find(*b, 0x7f800000u, kWeight, *report);
}
}
