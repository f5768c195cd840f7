// Simulates "cuda:0" in a CPU build of torch. Device memory is host memory, and every device kernel is the CPU's.
// An operation on tensors of two devices fails as on a GPU. Operations that make the host wait are reported to Python.
// A graph is a list of recorded operations; a replay runs them again on the same memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Storage;
using torch::jit::Stack;

namespace {
const Device GPU{c10::DeviceType::CUDA, 0}, HOST{c10::DeviceType::CPU};

// ---------------------------------------------------------------- reports to Python
using Callback = int (*)(const char* kind, const char* op, int64_t bytes);
Callback callback = nullptr;
std::map<std::string, int64_t> operations;
std::mutex lock;
bool capturing = false;

void wait(const char* kind, const std::string& op, int64_t bytes = 0) {
  TORCH_CHECK(!capturing, "CUDA error: operation not permitted when stream is capturing: ", op, " (", kind, ")");
  TORCH_CHECK(!callback || !callback(kind, op.c_str(), bytes), "called a synchronizing CUDA operation: ", op);
}

// ---------------------------------------------------------------- memory
std::set<const void*> pinned;
void unpin(void* p) {
  std::lock_guard<std::mutex> guard(lock);
  pinned.erase(p);
  free(p);
}
struct Pinned : c10::Allocator {
  DataPtr allocate(size_t n) override {
    void* p = malloc(n + 64);
    std::lock_guard<std::mutex> guard(lock);
    pinned.insert(p);
    return {p, p, &unpin, HOST};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
} pinned_allocator;

void release(void* storage) { delete static_cast<Storage*>(storage); }
DataPtr shared(const Storage& s, Device device) {
  return {const_cast<void*>(s.data()), new Storage(s), &release, device};
}
Storage on(Device device, const Storage& s) {  // the same memory
  return Storage(Storage::use_byte_size_t(), s.nbytes(), shared(s, device), c10::GetCPUAllocator(), true);
}
Tensor view(const Storage& s, const Tensor& like, std::optional<c10::DispatchKeySet> keys = std::nullopt) {
  const c10::DispatchKeySet own(s.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  Tensor t = keys ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, Storage(s), *keys, like.dtype())
                  : at::detail::make_tensor<c10::TensorImpl>(Storage(s), own, like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return t;
}

// ---------------------------------------------------------------- random numbers
struct Generator : at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed = c10::default_rng_seed_val) : at::CPUGeneratorImpl(seed) { be(GPU); }
  void be(Device device) { device_ = device; }
};
const at::Generator& default_generator() {
  static at::Generator g = at::make_generator<Generator>();
  return g;
}

// ---------------------------------------------------------------- one call, its arguments moved to the host
struct Call {
  std::vector<std::tuple<Tensor, Tensor, const void*>> tensors;    // host alias, device tensor, address before the call
  std::map<const c10::StorageImpl*, Storage> storages;             // host alias -> device storage
  std::map<const c10::StorageImpl*, Storage> aliases;              // device storage -> host alias
  std::vector<Generator*> generators;
  std::vector<std::pair<Tensor, bool>> strangers;                  // host tensors, and whether they are in a list
  bool masks = false;

  Storage host(const Storage& s) {
    auto* key = s.unsafeGetStorageImpl();
    auto found = aliases.find(key);
    if (found != aliases.end()) return found->second;
    Storage alias = on(HOST, s);
    storages.emplace(alias.unsafeGetStorageImpl(), s);
    aliases.emplace(key, alias);
    return alias;
  }
  Tensor host(const Tensor& t, bool listed) {
    if (!t.defined()) return t;
    masks |= listed && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
    if (!t.is_cuda()) {
      strangers.emplace_back(t, listed);
      return t;
    }
    Tensor h = view(host(t.storage()), t);
    tensors.emplace_back(h, t, h.storage().data());
    return h;
  }
  IValue host(const IValue& v) {
    if (v.isTensor()) return host(v.toTensor(), false);
    if (v.isTensorList()) {
      c10::List<Tensor> out;
      for (const Tensor t : v.toTensorVector()) out.push_back(host(t, true));
      return out;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> out;
      for (const std::optional<Tensor> t : v.toOptionalTensorVector())
        out.push_back(t ? std::optional<Tensor>(host(*t, true)) : t);
      return out;
    }
    if (v.isStorage()) return host(v.toStorage());
    if (v.isDevice() && v.toDevice().is_cuda()) return HOST;
    if (v.isGenerator()) {
      at::Generator g = v.toGenerator();
      TORCH_CHECK(g.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", g.device(), "'");
      TORCH_CHECK(!capturing, "Attempt to increase offset for a CUDA generator not in capture mode.");
      generators.push_back(static_cast<Generator*>(g.unsafeGetGeneratorImpl()));
      generators.back()->be(HOST);
    }
    return v;
  }
  Tensor device(const Tensor& h) {
    if (!h.defined()) return h;
    for (auto& [mine, original, memory] : tensors)
      if (mine.is_same(h)) return original;
    auto found = storages.find(h.storage().unsafeGetStorageImpl());
    if (found == storages.end()) return view(on(GPU, h.storage()), h);
    for (auto& [mine, original, memory] : tensors)
      if (mine.storage().is_alias_of(h.storage()))  // a view of an inference tensor is one, too
        return view(found->second, h, original.key_set());
    return view(found->second, h);
  }
  IValue device(const IValue& v) {
    if (v.isTensor()) return device(v.toTensor());
    if (v.isTensorList()) {
      c10::List<Tensor> out;
      for (const Tensor t : v.toTensorVector()) out.push_back(device(t));
      return out;
    }
    return v;
  }
  void settle() {  // copies sizes and memory that the call changed to the device's tensors
    for (auto& [h, t, memory] : tensors) {
      auto* impl = t.unsafeGetTensorImpl();
      auto now = h.storage().unsafeGetStorageImpl();
      auto found = storages.find(now);
      if (found == storages.end())
        impl->set_storage_keep_dtype(on(GPU, h.storage()));
      else if (found->second.unsafeGetStorageImpl() != t.storage().unsafeGetStorageImpl())
        impl->set_storage_keep_dtype(found->second);
      if (h.storage().data() != memory && found != storages.end()) {
        auto* old = found->second.unsafeGetStorageImpl();
        if (old->data() != h.storage().data()) {
          old->set_data_ptr_noswap(shared(h.storage(), GPU));
          old->set_nbytes(h.storage().nbytes());
        }
      }
      if (h.sizes() != t.sizes() || h.strides() != t.strides() || h.storage_offset() != t.storage_offset())
        impl->set_sizes_and_strides(h.sizes(), h.strides(), h.storage_offset());
    }
  }
  ~Call() {
    for (auto* g : generators) g->be(GPU);
  }
};

// ---------------------------------------------------------------- graphs
struct Step {
  c10::OperatorHandle op;
  Stack arguments;
  std::vector<std::pair<size_t, Tensor>> outputs;
};
std::map<int64_t, std::vector<Step>> graphs;
int64_t recording = 0;

void record(const c10::OperatorHandle& op, const Stack& arguments, const Stack& results, const Call& call) {
  Step step{op, arguments, {}};
  size_t index = 0;
  for (const IValue& v : results) {
    std::vector<Tensor> found;
    if (v.isTensor()) found.push_back(v.toTensor());
    if (v.isTensorList()) found = v.toTensorVector();
    for (const Tensor& t : found) {
      if (t.defined() && !call.storages.count(t.storage().unsafeGetStorageImpl())) step.outputs.emplace_back(index, t);
      ++index;
    }
  }
  graphs[recording].push_back(std::move(step));
}

// ---------------------------------------------------------------- the kernel of every operation
bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  for (const char* n : names)
    if (name == n) return true;
  return false;
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t n = schema.arguments().size();
  {
    std::lock_guard<std::mutex> guard(lock);
    ++operations[schema.overload_name().empty() ? name : name + "." + schema.overload_name()];
  }
  Call call;
  Stack host;
  for (const IValue& v : torch::jit::last(*stack, n)) {
    const bool random = v.isNone() && schema.arguments()[host.size()].type()->str() == "Generator?";
    host.push_back(call.host(random && !capturing ? IValue(default_generator()) : v));
  }
  const bool indexing = is_one_of(name, {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
                                         "aten::_unsafe_index", "aten::_unsafe_index_put"});
  for (auto& [t, listed] : call.strangers) {
    if (call.tensors.empty() || (listed && indexing)) continue;
    TORCH_CHECK(t.dim() == 0 && !listed && !is_one_of(name, {"aten::gather", "aten::index_select", "aten::embedding"}),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
                name, ", cpu ", t.sizes(), ")");
  }
  if (is_one_of(name, {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::dot"}))
    for (auto& entry : call.tensors)
      TORCH_CHECK(!at::isIntegralType(std::get<0>(entry).scalar_type(), true), "\"", name, "_cuda\" not implemented for '",
                  std::get<0>(entry).scalar_type(), "'");
  if (is_one_of(name, {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
                       "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::multinomial"}) ||
      (indexing && call.masks) || (name == "aten::repeat_interleave" && host.back().isNone()))
    wait("sync", name);
  if (name == "aten::histc" && at::isIntegralType(host[0].toTensor().scalar_type(), false))  // a GPU counts integers
    host[0] = host[0].toTensor().to(at::kDouble);
  Stack arguments = capturing ? host : Stack();
  op.callBoxed(&host);
  call.settle();
  if (capturing) record(op, arguments, host, call);
  torch::jit::drop(*stack, n);
  for (const IValue& v : host) stack->push_back(call.device(v));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  if (source.is_cuda() != self.is_cuda()) {
    const int64_t bytes = source.numel() * source.element_size();
    if (!non_blocking) wait(source.is_cuda() ? "to host" : "to device", "aten::copy_", bytes);
    else if (source.is_cuda() && callback) callback("to host, not waited for", "aten::copy_", bytes);
  }
  Call call;
  Stack host{call.host(self, false), call.host(source, false), non_blocking};
  Stack arguments = capturing ? host : Stack();
  op.callBoxed(&host);
  if (capturing) record(op, arguments, {}, call);
  return self;
}

// ---------------------------------------------------------------- device guard and hooks of the backend
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return GPU; }
  Device getDevice() const override { return GPU; }
  c10::Stream getStream(Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, GPU); }
  c10::Stream getNewStream(Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, GPU); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, GPU); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* p) const override {
    std::lock_guard<std::mutex> guard(lock);
    return pinned.count(p);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override {
    static bool first = true;  // the first one that Python creates is the default generator
    return std::exchange(first, false) ? default_generator() : at::make_generator<Generator>();
  }
  void deviceSynchronize(DeviceIndex) const override {}
};
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("copy_", &copy_); }
}  // namespace

extern "C" {
void simulated_install() {  // torch creates its hooks at import; they have no state, so they can be replaced in place
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
}
void simulated_callback(Callback c) { callback = c; }
void simulated_operations(void (*each)(const char*, int64_t)) {
  for (auto& [name, count] : operations) each(name.c_str(), count);
}
int64_t simulated_capture() {
  capturing = true;
  ++operations["graph captures"];
  return ++recording;
}
void simulated_captured() {
  capturing = false;
  operations["operations in graphs"] += graphs[recording].size();
}
const char* simulated_replay(int64_t graph) try {
  ++operations["graph replays"];
  c10::InferenceMode guard;
  for (Step& step : graphs.at(graph)) {
    if (step.op.schema().name().rfind("aten::empty", 0) == 0) continue;
    Stack stack = step.arguments;
    step.op.callBoxed(&stack);
    std::vector<Tensor> results;
    for (const IValue& v : stack) {
      if (v.isTensor()) results.push_back(v.toTensor());
      if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) results.push_back(t);
    }
    for (auto& [index, output] : step.outputs) output.copy_(results.at(index));
  }
  return nullptr;
} catch (const std::exception& error) {
  static std::string message;
  message = error.what();
  return message.c_str();
}
void simulated_resize(c10::StorageImpl* storage, int64_t bytes) {  // torch's own function is not in a CPU build
  DataPtr memory = c10::GetCPUAllocator()->allocate(bytes);
  memcpy(memory.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  memory.unsafe_set_device(GPU);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}
void simulated_forget(int64_t graph) { graphs.erase(graph); }
}
