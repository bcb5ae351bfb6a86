// What a launch is told and what it leaves: the binary interface between cuda.cu and jobs.py.
//
// A job is a row block of one matrix. A launch has one kernel, jobs of the same number of tiles, and one thread block
// for each tile of each job: blockIdx.y is the job, blockIdx.x the tile. Experts are small; so many share a launch.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned long long u64;

struct Partial;

// Pointers are to device memory, at multiples of 16. cols is a multiple of 8, rows * cols below 2^31.
struct Job {
  const u8* codes;                // of the source, as it is stored
  const u8* scales;               // of the source; null for plain kinds
  u8* out_codes;
  u8* out_scales;                 // float32 for e4m3, BF16 for INT4
  const float* column_weights;    // [cols], multiplied into the search's error weights; or null
  Partial* total;                 // where sum_partials leaves the whole job's
  u32 rows, cols;
  u32 scale_kind;                 // of the source's scales: a Kind
  u32 row_shift, col_shift;       // a source's scale stands for 2^row_shift x 2^col_shift elements; 31: for all
  u32 scale_cols;                 // scales in a row of the source's
  u32 objective;                  // of the search, as element_weight has it
  u32 power_of_two;               // round e4m3 scales up to powers of two
};

// What the threads of one block found. Counts are those of a Report (cpu.cpp). rare: scales' blocks that float cannot
// square (see `ordinary`), and scales from 2^100 on; where there are any, the CPU does the job once more.
struct Partial {
  u64 fault;  // the first one, as fault_key has it
  double error2, norm2;
  u32 tiny_scales, zero_blocks, negative_zeros, rare;
};

// Faults are looked for in the order of their classes (scales, weights, what the target cannot hold), each in row-major
// order: the smallest key is the first fault. index: the scale's place among the scales, else the element's.
constexpr u64 kNoFault = ~0ull;

PHASEFOLD_INLINE u64 fault_key(u64 fault, u64 index) {
  const u64 rank = fault == kWeight ? 1 : fault >= kNoInverse ? 2 : 0;
  return rank << 61 | index << 3 | fault;
}

// Tiles. build.py has the same numbers.
constexpr u32 kVector = 8;                      // neighbours in a row that one thread holds
constexpr u32 kRowsHigh = 32, kRowsWide = 256;  // of to_int4 and to_bf16; search_int4's are group / 4 rows high
constexpr u32 kScaleBlock = 128;                // of to_e4m3_blocks: its scale's
