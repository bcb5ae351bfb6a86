// Memory, pools of it, and copies.
//
// A copy from pageable memory takes its bytes when it is asked for and writes them in its turn; one to pageable memory
// is waited for: so does the real driver, which stages both. Pinned memory is read and written in its turn only.

namespace copies {

// Memory that operations still hold comes back first, if need be.
Result allocate(size_t size, int device, const char* how, void** found) {
  auto& memory = state().memory;
  Result result = memory.allocate(size, device, found);
  if (result == kOutOfMemory && device != kHost) {
    synchronize(&state().devices[device]);
    result = memory.allocate(size, device, found);
  }
  note("allocate %d %s %zu%s", device, how, size, result ? " refused" : "");
  return result;
}

Result release(void* address, const char* how) {
  const uint8_t* start = nullptr;
  const Region* region = state().memory.find(address, &start);
  if (!address) return kSuccess;
  if (!region || start != address) return kInvalidValue;
  note("release %d %s %zu", region->device, how, region->size);
  return state().memory.release(address);
}

Result allocate_pinned(void** found, size_t size) { return allocate(size, kHost, "pinned", found); }

// ---- pools

Pool* host_pool() { return state().pools[state().devices.size()].get(); }

Pool* pool_at(const Location& location) {
  if (location.type != kOnDevice) return host_pool();
  const auto ordinal = (size_t)location.id;
  return ordinal < state().devices.size() ? state().pools[ordinal].get() : nullptr;
}

Result find_pool(Pool** found, Location* location, int) {
  return (*found = pool_at(*location)) ? kSuccess : kInvalidDevice;
}

Result pool_of_device(Pool** found, int ordinal) {
  return (*found = pool_at({kOnDevice, ordinal})) ? kSuccess : kInvalidDevice;
}

Result make_pool(Pool** made, const PoolProperties* properties) {
  const Pool* like = pool_at(properties->location);
  if (!like) return kInvalidDevice;
  state().pools.push_back(std::make_unique<Pool>(Pool{like->device}));
  return *made = state().pools.back().get(), kSuccess;
}

Result pool_attribute(Pool* pool, int number, void* value) {
  if (number <= 3) return *static_cast<int*>(value) = 1, kSuccess;  // ways of reuse
  *static_cast<uint64_t*>(value) = number == 4 ? pool->threshold : state().memory.used(pool->device);
  return kSuccess;
}

Result set_pool_attribute(Pool* pool, int number, const void* value) {
  if (number == 4) pool->threshold = *static_cast<const uint64_t*>(value);
  return kSuccess;
}

Result allocate_from_pool(void** found, size_t size, Pool* pool, Stream* handle) {
  if (!stream_of(handle)) return kInvalidHandle;
  return allocate(size, pool->device, "pool", found);
}

Result allocate_in_stream(void** found, size_t size, Stream* handle) {
  return allocate_from_pool(found, size, state().pools[current->ordinal].get(), handle);
}

Result release_in_stream(void* address, Stream* handle) {
  Stream* stream = stream_of(handle);
  if (!stream) return kInvalidHandle;
  enqueue(stream, "release", [address] { return release(address, "pool"); });
  return kSuccess;
}

// ---- copies

const char* place(const void* address) {
  const Region* region = state().memory.find(address);
  return !region ? "pageable" : region->device == kHost ? "pinned" : "device";
}

bool fits(const void* address, size_t size) {  // pageable memory is not known, and stays for all of the copy
  return !state().memory.find(address) || state().memory.holds(address, size);
}

Result move(void* to, const void* from, size_t size, bool to_known, bool from_known) {
  auto& memory = state().memory;
  if ((to_known && !memory.holds(to, size)) || (from_known && !memory.holds(from, size))) {
    complain("a copy's memory was freed before its turn");
    return kIllegalAddress;
  }
  memmove(to, from, size);
  return kSuccess;
}

Result copy(void* to, const void* from, size_t size, Stream* handle, bool wait) {
  Stream* stream = stream_of(handle);
  if (!stream) return kInvalidHandle;
  if (!size) return kSuccess;
  if (!fits(to, size) || !fits(from, size)) return kInvalidValue;
  const bool to_known = state().memory.find(to), from_known = state().memory.find(from);
  const std::string text = std::string("copy ") + place(from) + " " + place(to) + " " + std::to_string(size);
  if (from_known) {
    enqueue(stream, text, [=] { return move(to, from, size, to_known, true); });
  } else {
    const auto* bytes = static_cast<const uint8_t*>(from);
    auto staged = std::make_shared<std::vector<uint8_t>>(bytes, bytes + size);
    enqueue(stream, text, [=] { return move(to, staged->data(), size, to_known, false); });
  }
  if (wait || !to_known) {
    note("sync %d:%d", stream->device->ordinal, stream->number);
    stream->drain();
  }
  return stream->device->error;
}

template <class Word>
Result fill(void* to, Word word, size_t count, Stream* handle, bool wait) {
  Stream* stream = stream_of(handle);
  if (!stream) return kInvalidHandle;
  if (!count) return kSuccess;
  if (!state().memory.holds(to, count * sizeof word)) return kInvalidValue;
  enqueue(stream, "fill " + std::to_string(count * sizeof word), [=] {
    if (!state().memory.holds(to, count * sizeof word)) return kIllegalAddress;
    std::fill_n(static_cast<Word*>(to), count, word);
    return kSuccess;
  });
  if (wait) stream->drain();
  return stream->device->error;
}

Result pointer_attribute(void* value, int number, void* pointer) {
  const uint8_t* start = nullptr;
  const Region* region = state().memory.find(pointer, &start);
  if (!region) return kInvalidValue;
  const bool host = region->device == kHost;
  switch (number) {
    case kContextOf: *static_cast<void**>(value) = &state().devices[host ? 0 : region->device]; break;
    case kMemoryType: *static_cast<unsigned*>(value) = host ? 1 : 2; break;
    case kHostPointer:
      if (!host) return kInvalidValue;
      [[fallthrough]];
    case kDevicePointer: *static_cast<void**>(value) = pointer; break;
    case kIsManaged: *static_cast<unsigned*>(value) = 0; break;
    case kDeviceOrdinal: *static_cast<int*>(value) = host ? 0 : region->device; break;
    case kRangeStart: *static_cast<const void**>(value) = start; break;
    case kRangeSize: *static_cast<size_t*>(value) = region->size; break;
    case kMapped: *static_cast<unsigned*>(value) = 1; break;
    default: return kNotSupported;
  }
  return kSuccess;
}

// What is not known of a pointer is 0, as in the real driver.
Result pointer_attributes(unsigned count, const int* numbers, void** values, void* pointer) {
  for (unsigned i = 0; i < count; i++)
    if (pointer_attribute(values[i], numbers[i], pointer)) {
      const bool wide = numbers[i] == kContextOf || numbers[i] == kDevicePointer || numbers[i] == kHostPointer ||
                        numbers[i] == kRangeStart || numbers[i] == kRangeSize;
      memset(values[i], 0, wide ? 8 : 4);
      if (numbers[i] == kDeviceOrdinal) *static_cast<int*>(values[i]) = -2;
    }
  return kSuccess;
}

template <class Word>
void add_fills(std::vector<Call>& calls, const char* name, const char* name_async) {
  calls.push_back(call<[](void* to, Word word, size_t n) { return fill(to, word, n, nullptr, true); }>(name, 3020));
  calls.push_back(call<[](void* to, Word word, size_t n, Stream* s) { return fill(to, word, n, s, false); }>(
      name_async, 3020));
}

std::vector<Call> calls() {
  std::vector<Call> calls = {
      call<[](void** found, size_t size) { return allocate(size, current->ordinal, "device", found); }>(
          "cuMemAlloc", 3020),
      open_call<[](void* address) {  // what still uses it ends before
        if (const Region* region = state().memory.find(address); region && region->device != kHost)
          synchronize(&state().devices[region->device]);
        return release(address, "device");
      }>("cuMemFree", 3020),
      call<allocate_pinned>("cuMemAllocHost", 3020),
      call<[](void** found, size_t size, unsigned) { return allocate_pinned(found, size); }>("cuMemHostAlloc", 2020),
      open_call<[](void* address) { return release(address, "pinned"); }>("cuMemFreeHost", 2000),
      call<[](void* start, size_t size, unsigned) { return state().memory.adopt(start, size); }>(
          "cuMemHostRegister", 6050),
      open_call<[](void* start) { return release(start, "registered"); }>("cuMemHostUnregister", 4000),
      call<[](void** found, void* address, unsigned) { return *found = address, kSuccess; }>(
          "cuMemHostGetDevicePointer", 3020),
      call<allocate_in_stream>("cuMemAllocAsync", 11020),
      call<allocate_from_pool>("cuMemAllocFromPoolAsync", 11020),
      open_call<release_in_stream>("cuMemFreeAsync", 11020),
      call<make_pool>("cuMemPoolCreate", 11020),
      open_call<[](Pool*) { return kSuccess; }>("cuMemPoolDestroy", 11020),
      open_call<pool_attribute>("cuMemPoolGetAttribute", 11020),
      open_call<set_pool_attribute>("cuMemPoolSetAttribute", 11020),
      open_call<[](Pool*, const AccessDescription*, size_t) { return kSuccess; }>("cuMemPoolSetAccess", 11020),
      open_call<[](int* flags, Pool* pool, Location* location) {
        const bool own = pool->device == kHost || (location->type == kOnDevice && location->id == pool->device);
        return *flags = own ? 3 : 0, kSuccess;
      }>("cuMemPoolGetAccess", 11020),
      open_call<[](Pool*, size_t) { return kSuccess; }>("cuMemPoolTrimTo", 11020),
      open_call<pool_of_device>("cuDeviceGetDefaultMemPool", 11020),
      open_call<pool_of_device>("cuDeviceGetMemPool", 11020),
      open_call<find_pool>("cuMemGetDefaultMemPool", 13000),
      open_call<find_pool>("cuMemGetMemPool", 13000),
      open_call<pointer_attribute>("cuPointerGetAttribute", 4000),
      open_call<pointer_attributes>("cuPointerGetAttributes", 7000),
  };
  for (const char* name : {"cuMemcpy", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD"})
    for (const int version : {3020, 4000})
      calls.push_back(call<[](void* to, const void* from, size_t size) {
        return copy(to, from, size, nullptr, true);
      }>(name, version));
  for (const char* name : {"cuMemcpyAsync", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync"})
    for (const int version : {3020, 4000})
      calls.push_back(call<[](void* to, const void* from, size_t size, Stream* stream) {
        return copy(to, from, size, stream, false);
      }>(name, version));
  calls.push_back(call<[](void* to, const void* from, size_t size, CopyAttributes*, Stream* stream) {
    return copy(to, from, size, stream, false);
  }>("cuMemcpyWithAttributesAsync", 13020));
  add_fills<uint8_t>(calls, "cuMemsetD8", "cuMemsetD8Async");
  add_fills<uint16_t>(calls, "cuMemsetD16", "cuMemsetD16Async");
  add_fills<uint32_t>(calls, "cuMemsetD32", "cuMemsetD32Async");
  return calls;
}

}  // namespace copies
