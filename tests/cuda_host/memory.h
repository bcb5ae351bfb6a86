// Memory of the devices and pinned memory: mapped from the host's, poisoned, between pages that nobody may touch.
//
// An allocation ends, to 16 bytes, where its last page does: what runs over its end has no memory. Its pages are
// private copies of a file of poison, so that gigabytes that nobody writes cost nothing. What is freed is never mapped
// again.

#include <map>
#include <mutex>
#include <sys/mman.h>

constexpr int kHost = -1;
constexpr size_t kPageBytes = 4096, kPoisonBytes = 4u << 20;

struct Region {
  uint8_t* map;
  size_t mapped, size;
  int device;    // or kHost
  bool foreign;  // registered by the caller, not ours to unmap
};

class Memory {
 public:
  Result allocate(size_t size, int device, void** found) {
    if (!size) return kInvalidValue;
    const bool host = device == kHost;
    auto& used = used_[device];
    if (size > (host ? settings().pinned : settings().memory) - used) return kOutOfMemory;
    const size_t pages = (size + kPageBytes - 1) / kPageBytes * kPageBytes, mapped = pages + 2 * kPageBytes;
    void* map = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return kOutOfMemory;
    auto* base = static_cast<uint8_t*>(map);
    for (size_t at = 0; at < pages; at += kPoisonBytes)
      if (mmap(base + kPageBytes + at, std::min(pages - at, kPoisonBytes), PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, poison(), 0) == MAP_FAILED)
        abort();
    used += size;
    auto* start = base + kPageBytes + pages - (size + 15) / 16 * 16;
    regions_[start] = {base, mapped, size, device, false};
    *found = start;
    return kSuccess;
  }

  Result release(void* start) {
    const auto found = regions_.find(static_cast<uint8_t*>(start));
    if (found == regions_.end()) return kInvalidValue;
    const Region& region = found->second;
    used_[region.device] -= region.size;
    if (!region.foreign)  // the addresses stay taken: who uses them still has no memory there
      mmap(region.map, region.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    regions_.erase(found);
    return kSuccess;
  }

  Result adopt(void* start, size_t size) {  // a caller's own memory, to be as pinned memory is
    if (!size || find(start)) return kInvalidValue;
    regions_[static_cast<uint8_t*>(start)] = {nullptr, 0, size, kHost, true};
    used_[kHost] += size;
    return kSuccess;
  }

  // The allocation that an address lies in, and where it begins; null for pageable memory.
  const Region* find(const void* address, const uint8_t** start = nullptr) const {
    const auto* at = static_cast<const uint8_t*>(address);
    auto found = regions_.upper_bound(const_cast<uint8_t*>(at));
    if (found == regions_.begin()) return nullptr;
    --found;
    if (at >= found->first + found->second.size) return nullptr;
    if (start) *start = found->first;
    return &found->second;
  }

  bool holds(const void* address, size_t size) const {  // to the end
    const uint8_t* start;
    const Region* region = find(address, &start);
    return region && size <= region->size - (static_cast<const uint8_t*>(address) - start);
  }

  // Where an address lies that nobody may touch, in words.
  std::string describe(const void* address) const {
    const auto* at = static_cast<const uint8_t*>(address);
    for (const auto& [start, region] : regions_)
      if (region.map && at >= region.map && at < region.map + region.mapped) {
        const bool after = at >= start + region.size;
        const long long beyond = after ? at - (start + region.size) : start - at;
        if (!after && at >= start) return "of another card";
        return std::to_string(beyond) + " bytes " + (after ? "behind" : "before") + " an allocation of " +
               std::to_string(region.size) + " bytes";
      }
    return "in no allocation, or in one that is freed";
  }

  // A kernel reaches its own card's memory and the host's, not another card's.
  void show_others(int device, bool visible) {
    if (settings().devices < 2) return;
    for (const auto& [start, region] : regions_)
      if (region.device != kHost && region.device != device)
        mprotect(region.map + kPageBytes, region.mapped - 2 * kPageBytes,
                 visible ? PROT_READ | PROT_WRITE : PROT_NONE);
  }

  size_t used(int device) { return used_[device]; }

 private:
  static int poison() {
    static const int file = [] {
      const int made = memfd_create("poison", MFD_CLOEXEC);
      if (made < 0 || ftruncate(made, kPoisonBytes)) abort();
      void* map = mmap(nullptr, kPoisonBytes, PROT_READ | PROT_WRITE, MAP_SHARED, made, 0);
      if (map == MAP_FAILED) abort();
      for (size_t i = 0; i < kPoisonBytes / 4; i++) static_cast<uint32_t*>(map)[i] = 0x7ff9a5b7;  // as launcher.h's
      munmap(map, kPoisonBytes);
      return made;
    }();
    return file;
  }

  std::map<uint8_t*, Region> regions_;
  std::map<int, size_t> used_;
};
