// Devices, contexts, and the text of errors.

namespace devices {

Device* device_at(int ordinal) {
  auto& devices = state().devices;
  return ordinal >= 0 && ordinal < (int)devices.size() ? &devices[ordinal] : nullptr;
}

Result initialize(unsigned) {
  auto& all = state();
  if (settings().init) return (Result)settings().init;
  if (settings().devices < 1) return kNoDevice;
  if (all.initialized) return kSuccess;
  all.devices.resize(settings().devices);
  for (int i = 0; i < settings().devices; i++) {
    all.devices[i].ordinal = i;
    all.streams.push_back(std::make_unique<Stream>(Stream{0, &all.devices[i], true, {}}));
    all.pools.push_back(std::make_unique<Pool>(Pool{i}));
  }
  all.pools.push_back(std::make_unique<Pool>(Pool{kHost}));
  all.initialized = true;
  return kSuccess;
}

Result attribute(int* value, int number, int ordinal) {
  if (!device_at(ordinal)) return kInvalidDevice;
  *value = number == 75   ? settings().capability / 10
           : number == 76 ? settings().capability % 10
           : number == 33 ? ordinal + 1  // on the PCI bus
                          : 0;
  for (const auto& known : kDeviceAttributes)
    if (known.number == number) *value = known.value;
  return kSuccess;
}

const ResultText* text_of(int code) {
  for (const auto& known : kResultTexts)
    if (known.code == code) return &known;
  return nullptr;
}

Result error_name(int code, const char** name) {
  const ResultText* known = text_of(code);
  *name = known ? known->name : nullptr;
  return known ? kSuccess : kInvalidValue;
}

Result error_text(int code, const char** text) {
  const ResultText* known = text_of(code);
  *text = known ? known->text : nullptr;
  return known ? kSuccess : kInvalidValue;
}

Result get_device(int* device, int ordinal) {
  if (!state().initialized) return kNotInitialized;
  return device_at(ordinal) ? (*device = ordinal, kSuccess) : kInvalidDevice;
}

Result count(int* devices) {
  if (!state().initialized) return kNotInitialized;
  return *devices = (int)state().devices.size(), kSuccess;
}

Result uuid(unsigned char* bytes, int ordinal) {
  memset(bytes, 0x5a, 16);
  return bytes[15] = (unsigned char)ordinal, kSuccess;
}

Result retain(Device** context, int ordinal) {
  *context = device_at(ordinal);
  if (!*context) return kInvalidDevice;
  return (*context)->holders++, kSuccess;
}

Result release(int ordinal) {
  Device* device = device_at(ordinal);
  if (!device || !device->holders) return kInvalidContext;
  return device->holders--, kSuccess;
}

Result context_state(int ordinal, unsigned* flags, int* active) {
  if (!device_at(ordinal)) return kInvalidDevice;
  return *flags = 0, *active = device_at(ordinal)->holders > 0, kSuccess;
}

thread_local std::vector<Device*> pushed;

Result push(Device* context) {
  pushed.push_back(current);
  return current = context, kSuccess;
}

Result pop(Device** context) {
  if (pushed.empty()) return kInvalidContext;
  if (context) *context = current;
  current = pushed.back();
  return pushed.pop_back(), kSuccess;
}

Result context_device(int* ordinal, Device* context) {
  return context ? (*ordinal = context->ordinal, kSuccess) : kInvalidContext;
}

std::vector<Call> calls() {
  return {
      open_call<initialize>("cuInit", 2000),
      open_call<[](int* version) { return *version = settings().version, kSuccess; }>("cuDriverGetVersion", 2020),
      open_call<error_name>("cuGetErrorName", 6000),
      open_call<error_text>("cuGetErrorString", 6000),
      open_call<get_device>("cuDeviceGet", 2000),
      open_call<count>("cuDeviceGetCount", 2000),
      open_call<[](char* name, int size, int) {
        return snprintf(name, size, "%s", settings().name.c_str()), kSuccess;
      }>("cuDeviceGetName", 2000),
      open_call<uuid>("cuDeviceGetUuid", 11040),
      open_call<[](size_t* bytes, int) { return *bytes = settings().memory, kSuccess; }>("cuDeviceTotalMem", 3020),
      open_call<attribute>("cuDeviceGetAttribute", 2000),
      open_call<[](char* id, int size, int ordinal) {
        return snprintf(id, size, "0000:%02x:00.0", ordinal + 1), kSuccess;
      }>("cuDeviceGetPCIBusId", 4010),
      open_call<[](int* can, int, int) { return *can = 0, kSuccess; }>("cuDeviceCanAccessPeer", 4000),
      open_call<retain>("cuDevicePrimaryCtxRetain", 7000),
      open_call<release>("cuDevicePrimaryCtxRelease", 11000),
      open_call<context_state>("cuDevicePrimaryCtxGetState", 7000),
      open_call<[](Device* context) { return current = context, kSuccess; }>("cuCtxSetCurrent", 4000),
      open_call<[](Device** context) { return *context = current, kSuccess; }>("cuCtxGetCurrent", 4000),
      open_call<push>("cuCtxPushCurrent", 4000),
      open_call<pop>("cuCtxPopCurrent", 4000),
      call<[](int* ordinal) { return context_device(ordinal, current); }>("cuCtxGetDevice", 2000),
      call<[](int* ordinal, Device* context) {
        return context_device(ordinal, context ? context : current);
      }>("cuCtxGetDevice", 13000),
      call<[] { return synchronize(current); }>("cuCtxSynchronize", 2000),
      call<[](Device* context) { return synchronize(context ? context : current); }>("cuCtxSynchronize", 13000),
      call<[](int* least, int* greatest) {
        return *least = 0, *greatest = -5, kSuccess;
      }>("cuCtxGetStreamPriorityRange", 5050),
      call<[](size_t* free, size_t* total) {
        *total = settings().memory;
        return *free = *total - state().memory.used(current->ordinal), kSuccess;
      }>("cuMemGetInfo", 3020),
  };
}

}  // namespace devices
