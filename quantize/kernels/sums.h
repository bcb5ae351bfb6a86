// Sums of squares. Included by cpu.cpp once for each instruction set.

constexpr u32 kOrdinaryLow = 0x30800000u, kOrdinaryHigh = 0x5d800000u, kInfinity = 0x7f800000u;  // 2^-30, 2^60
constexpr int kFlush = 32 * LANES;  // elements that are added in float before the sum goes into double

// May the squares of a block with this amax be summed in float, and those of its errors? (They would not over- or
// underflow so far as to count.) Otherwise they are summed one by one in double.
LANE_INLINE bool ordinary(u32 amax) { return amax == 0 || (amax >= kOrdinaryLow && amax < kOrdinaryHigh); }

struct Sums {
  Floats error = {}, norm = {};
  Doubles error_lanes = {}, norm_lanes = {};
  double error_rest = 0, norm_rest = 0;
  LANE_MEMBER void add(Floats e, Floats x) {
    error = fused(e, e, error);
    norm = fused(x, x, norm);
  }
  LANE_MEMBER void add_exact(double e, double x) {
    error_rest += e * e;
    norm_rest += x * x;
  }
  LANE_MEMBER void flush() {
    error_lanes += halves_added(error);
    norm_lanes += halves_added(norm);
    error = norm = Floats{};
  }
  // Sums made elsewhere; one whose unit is 0 is not to be trusted (it may be infinite) and is left out.
  LANE_MEMBER void take(Floats errors, Floats norms, double error_unit, bool without_norm) {
    if (error_unit != 0.0) error_lanes += halves_added(errors) * error_unit;
    if (!without_norm) norm_lanes += halves_added(norms);
  }
  LANE_MEMBER double error2() const { return error_rest + total(error_lanes); }
  LANE_MEMBER double norm2() const { return norm_rest + total(norm_lanes); }
};
