// Streams, events, kernels and their launches.

namespace launches {

// ---- streams and events

Result make_stream(Stream** made, unsigned flags, int) {
  auto& all = state();
  const int number = (int)all.streams.size();
  all.streams.push_back(std::make_unique<Stream>(Stream{number, current, !(flags & 1), {}}));
  *made = all.streams.back().get();
  return all.open.insert(*made), kSuccess;
}

Result end_stream(Stream* stream) {
  if (!state().open.erase(stream)) return kInvalidHandle;
  stream->drain();
  return kSuccess;
}

Result wait_for(Stream* handle) {
  Stream* stream = stream_of(handle);
  if (!stream) return kInvalidHandle;
  note("sync %d:%d", stream->device->ordinal, stream->number);
  stream->drain();
  return stream->device->error;
}

// Who asks again and again comes to an end: each question carries out one operation.
Result progress(Stream* stream, unsigned long long end) {
  if (stream->done < end) stream->advance(stream->done + 1);
  if (stream->device->error) return stream->device->error;
  return stream->done < end ? kNotReady : kSuccess;
}

Result make_event(Event** made, unsigned flags) {
  *made = new Event{current, !(flags & 2)};
  return state().events.insert(*made), kSuccess;
}

Result end_event(Event* event) {
  return state().events.erase(event) ? kSuccess : kInvalidHandle;  // the object stays: operations may hold it
}

Result record(Event* event, Stream* handle) {
  Stream* stream = stream_of(handle);
  if (!stream || !state().events.count(event)) return kInvalidHandle;
  enqueue(stream, "event", [event] { return event->time = std::chrono::steady_clock::now(), kSuccess; });
  event->stream = stream;
  event->end = stream->enqueued();
  return kSuccess;
}

Result wait_in_stream(Stream* handle, Event* event, unsigned) {
  Stream* stream = stream_of(handle);
  if (!stream || !state().events.count(event)) return kInvalidHandle;
  if (event->stream)
    enqueue(stream, "wait " + std::to_string(event->stream->number),
            [other = event->stream, end = event->end] { return other->advance(end), kSuccess; });
  return kSuccess;
}

Result wait_for_event(Event* event) {
  if (!state().events.count(event)) return kInvalidHandle;
  if (!event->stream) return kSuccess;
  note("sync %d:%d event", event->stream->device->ordinal, event->stream->number);
  event->stream->advance(event->end);
  return event->device->error;
}

Result elapsed(float* milliseconds, Event* start, Event* end) {
  if (!start->timed || !end->timed || !start->stream || !end->stream) return kInvalidHandle;
  if (start->stream->done < start->end || end->stream->done < end->end) return kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return kSuccess;
}

// ---- libraries of kernels

// A cubin is an ELF file: its section headers are the last of it, or its program headers.
size_t size_of_cubin(const uint8_t* code) {
  uint64_t programs, sections;
  uint16_t program_size, program_count, section_size, section_count;
  memcpy(&programs, code + 32, 8);
  memcpy(&sections, code + 40, 8);
  memcpy(&program_size, code + 54, 2);
  memcpy(&program_count, code + 56, 2);
  memcpy(&section_size, code + 58, 2);
  memcpy(&section_count, code + 60, 2);
  return std::max<size_t>(sections + section_size * section_count, programs + program_size * program_count);
}

Result load(Library** made, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  const auto* bytes = static_cast<const uint8_t*>(code);
  if (memcmp(code, "\x7f" "ELF", 4)) return kInvalidImage;  // PTX would have to be compiled
  const int built_for = bytes[49], card = settings().capability;  // the second byte of the ELF file's flags
  if (built_for / 10 != card / 10 || built_for > card) return kNoBinaryForGpu;
  *made = new Library{std::string(static_cast<const char*>(code), size_of_cubin(bytes)), {}};
  note("load %zu", (*made)->code.size());
  return state().libraries.insert(*made), kSuccess;
}

Result unload(Library* library) { return state().libraries.erase(library) ? kSuccess : kInvalidHandle; }

const std::vector<void*>& host_libraries() {
  static const std::vector<void*> loaded = [] {
    std::vector<void*> found;
    std::string rest = settings().kernels + ":";
    for (size_t end; (end = rest.find(':')) != std::string::npos; rest.erase(0, end + 1)) {
      if (!end) continue;
      void* library = dlopen(rest.substr(0, end).c_str(), RTLD_NOW | RTLD_LOCAL);
      if (!library) complain(dlerror());
      else found.push_back(library);
    }
    return found;
  }();
  return loaded;
}

Result get_kernel(Kernel** made, Library* library, const char* name) {
  if (!state().libraries.count(library)) return kInvalidHandle;
  if (library->code.find(std::string(".text.") + name + '\0') == std::string::npos) return kNotFound;
  for (Kernel* known : library->kernels)
    if (known->name == name) return *made = known, kSuccess;
  for (void* host : host_libraries())
    if (void* function = dlsym(host, name)) {
      *made = new Kernel{name, function, reinterpret_cast<decltype(Kernel::launch)>(dlsym(host, "host_launch"))};
      library->kernels.insert(*made);
      return state().kernels.insert(*made), kSuccess;
    }
  complain(std::string("the cubin has a kernel that no library of HOSTCARD_KERNELS has: ") + name);
  return kNotFound;
}

Result parameter(Kernel*, size_t index, size_t* offset, size_t* size) {  // see launcher.h
  if (index >= 3) return kInvalidValue;
  *offset = 8 * index;
  if (size) *size = 8;
  return kSuccess;
}

Result function_attribute(int* value, int number) {
  *value = number == 0 ? 1024 : number == 5 || number == 6 ? settings().capability : 0;
  return kSuccess;
}

// ---- launches

Result run(const Kernel* kernel, unsigned x, unsigned y, unsigned threads, const uint64_t* arguments, int device) {
  auto& memory = state().memory;
  void* address = nullptr;
  memory.show_others(device, false);
  const char* wrong = kernel->launch(kernel->function, x, y, threads, arguments, settings().order, &address);
  memory.show_others(device, true);
  if (!wrong) return kSuccess;
  complain(kernel->name + ": " + wrong + (address ? ", " + memory.describe(address) : ""));
  return address ? kIllegalAddress : kLaunchFailed;
}

Result launch(const LaunchConfig* config, Kernel* kernel, void** arguments, void** extra) {
  Stream* stream = stream_of(config->stream);
  if (!stream || !state().kernels.count(kernel)) return kInvalidHandle;
  const unsigned x = config->grid[0], y = config->grid[1], threads = config->block[0];
  if (!x || !y || !threads || x > 2147483647u || y > 65535 || threads > 1024) return kInvalidValue;
  if (config->grid[2] != 1 || config->block[1] != 1 || config->block[2] != 1 || config->shared_bytes || extra) {
    complain(kernel->name + ": a grid of two dimensions, blocks of one and no dynamic shared memory are all there is");
    return kNotSupported;
  }
  uint64_t copied[3];
  for (int i = 0; i < 3; i++) memcpy(&copied[i], arguments[i], 8);
  const bool fails = ++state().launches == settings().fail_at;
  char shape[64];
  snprintf(shape, sizeof shape, " %u %u %u", x, y, threads);
  enqueue(stream, "launch " + kernel->name + shape,
          [=, a = copied[0], b = copied[1], c = copied[2], device = stream->device->ordinal] {
            const uint64_t all[] = {a, b, c};
            return fails ? (Result)settings().fail_with : run(kernel, x, y, threads, all, device);
          });
  return kSuccess;
}

Result launch_plain(Kernel* kernel, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                    unsigned block_z, unsigned shared, Stream* stream, void** arguments, void** extra) {
  const LaunchConfig config = {{x, y, z}, {block_x, block_y, block_z}, shared, stream, nullptr, 0};
  return launch(&config, kernel, arguments, extra);
}

std::vector<Call> calls() {
  return {
      call<[](Stream** made, unsigned flags) { return make_stream(made, flags, 0); }>("cuStreamCreate", 2000),
      call<make_stream>("cuStreamCreateWithPriority", 5050),
      open_call<end_stream>("cuStreamDestroy", 4000),
      call<wait_for>("cuStreamSynchronize", 2000),
      call<[](Stream* handle) {
        Stream* stream = stream_of(handle);
        return stream ? progress(stream, stream->enqueued()) : kInvalidHandle;
      }>("cuStreamQuery", 2000),
      call<wait_in_stream>("cuStreamWaitEvent", 3020),
      call<[](Stream* stream, Device** context) {
        return stream_of(stream) ? (*context = stream_of(stream)->device, kSuccess) : kInvalidHandle;
      }>("cuStreamGetCtx", 9020),
      call<[](Stream* stream, Device** context, void** green) {
        if (green) *green = nullptr;
        return stream_of(stream) ? (*context = stream_of(stream)->device, kSuccess) : kInvalidHandle;
      }>("cuStreamGetCtx", 12050),
      call<[](Stream* stream, int* device) {
        return stream_of(stream) ? (*device = stream_of(stream)->device->ordinal, kSuccess) : kInvalidHandle;
      }>("cuStreamGetDevice", 12080),
      call<[](Stream* stream, unsigned* flags) {
        return stream_of(stream) ? (*flags = !stream_of(stream)->blocking, kSuccess) : kInvalidHandle;
      }>("cuStreamGetFlags", 5050),
      call<[](Stream*, int* priority) { return *priority = 0, kSuccess; }>("cuStreamGetPriority", 5050),
      call<[](Stream*, int* capturing) { return *capturing = 0, kSuccess; }>("cuStreamIsCapturing", 10000),
      call<make_event>("cuEventCreate", 2000),
      open_call<end_event>("cuEventDestroy", 4000),
      call<record>("cuEventRecord", 2000),
      call<[](Event* event, Stream* stream, unsigned) { return record(event, stream); }>(
          "cuEventRecordWithFlags", 11010),
      call<[](Event* event) {
        if (!state().events.count(event)) return kInvalidHandle;
        return event->stream ? progress(event->stream, event->end) : kSuccess;
      }>("cuEventQuery", 2000),
      call<wait_for_event>("cuEventSynchronize", 2000),
      call<elapsed>("cuEventElapsedTime", 2000),
      call<load>("cuLibraryLoadData", 12000),
      open_call<unload>("cuLibraryUnload", 12000),
      call<get_kernel>("cuLibraryGetKernel", 12000),
      call<[](Kernel** function, Kernel* kernel) { return *function = kernel, kSuccess; }>(
          "cuKernelGetFunction", 12000),
      call<[](const char** name, Kernel* kernel) { return *name = kernel->name.c_str(), kSuccess; }>(
          "cuKernelGetName", 12030),
      call<parameter>("cuKernelGetParamInfo", 12040),
      call<[](int* value, int number, Kernel*, int) { return function_attribute(value, number); }>(
          "cuKernelGetAttribute", 12000),
      call<[](int* value, int number, Kernel*) { return function_attribute(value, number); }>(
          "cuFuncGetAttribute", 2020),
      call<launch>("cuLaunchKernelEx", 11060),
      call<launch_plain>("cuLaunchKernel", 4000),
  };
}

}  // namespace launches
