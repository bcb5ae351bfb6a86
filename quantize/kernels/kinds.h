// Numbers of the kinds, methods and faults, on the CPU and on the card: native.py has the same lists.
enum Kind { kF32, kBF16, kF16, kE4M3, kInt4, kE2M1, kE8M0 };
enum Method { kRtn, kSearch, kInverse };
enum Fault { kNone, kWeight, kScale, kNegative, kZeroScale, kNoInverse, kOverflow };
