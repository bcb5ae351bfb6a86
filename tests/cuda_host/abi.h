// The part of the CUDA driver's binary interface that driver.cpp answers, declared from its documentation.

#include <cstddef>
#include <cstdint>

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchFailed = 719,
  kNotSupported = 801,
};

// Names and texts are those of the real driver.
struct ResultText {
  int code;
  const char *name, *text;
};
constexpr ResultText kResultTexts[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

using DevicePointer = unsigned long long;

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  struct Stream* stream;
  void* attributes;
  unsigned attribute_count;
};

enum LocationType : int { kOnDevice = 1, kOnHost = 2 };  // larger ones: a host's NUMA node

struct Location {
  int type, id;
};

struct PoolProperties {
  int allocation_type, handle_types;
  Location location;
  void* security;
  size_t most;
  unsigned short usage;
  unsigned char reserved[54];
};

struct AccessDescription {
  Location location;
  int flags;
};

struct CopyAttributes {
  int source_order;
  Location source, destination;
  unsigned flags;
};

enum PointerAttribute : int {
  kContextOf = 1,
  kMemoryType = 2,  // 1: host, 2: device
  kDevicePointer = 3,
  kHostPointer = 4,
  kIsManaged = 8,
  kDeviceOrdinal = 9,
  kRangeStart = 11,
  kRangeSize = 12,
  kMapped = 13,
};

// Attributes of a device that are no compute capability, as an H200 has them; others are 0.
struct DeviceAttribute {
  int number, value;
};
constexpr DeviceAttribute kDeviceAttributes[] = {
    {1, 1024},      // threads of a block
    {2, 1024},      // x of a block
    {3, 1024},      // y
    {4, 64},        // z
    {5, 2147483647},  // x of a grid
    {6, 65535},     // y
    {7, 65535},     // z
    {8, 49152},     // shared memory of a block
    {9, 65536},     // constant memory
    {10, 32},       // warp size
    {11, 2147483647},  // pitch
    {12, 65536},    // registers of a block
    {13, 1980000},  // kHz
    {14, 512},      // texture alignment
    {16, 132},      // multiprocessors
    {19, 1},        // maps host memory
    {31, 1},        // concurrent kernels
    {36, 3201000},  // kHz of memory
    {37, 6144},     // bits of its bus
    {38, 62914560},  // L2 cache
    {39, 2048},     // threads of a multiprocessor
    {40, 3},        // copy engines
    {41, 1},        // unified addressing
    {78, 1},        // priorities of streams
    {81, 233472},   // shared memory of a multiprocessor
    {82, 65536},    // registers of a multiprocessor
    {97, 232448},   // shared memory of a block that asks for it
    {99, 1},        // host memory can be registered
    {106, 32},      // blocks of a multiprocessor
    {111, 1024},    // shared memory of a block that is the system's
    {115, 1},       // memory pools
    {142, 1},       // of a NUMA node of the host
    {144, 1},       // of the host
};
