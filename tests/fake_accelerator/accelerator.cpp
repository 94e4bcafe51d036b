// An accelerator that is not there: device memory that the host cannot read, streams, generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <map>
#include <mutex>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto KIND = c10::DeviceType::PrivateUse1;

// ---- memory: pages that nobody may touch outside of an operator ----

struct Block {
  size_t bytes;
  int open = 0;
};
std::mutex guard_of_blocks;
std::map<char*, Block> blocks;

std::pair<char* const, Block>* block_of(const void* at) {
  auto found = blocks.upper_bound(static_cast<char*>(const_cast<void*>(at)));
  if (found == blocks.begin())
    return nullptr;
  --found;
  return static_cast<const char*>(at) < found->first + found->second.bytes ? &*found : nullptr;
}

void give_back(void* at) {
  if (at == nullptr)
    return;
  std::lock_guard<std::mutex> hold(guard_of_blocks);
  auto found = blocks.find(static_cast<char*>(at));
  munmap(at, found->second.bytes);
  blocks.erase(found);
}

class Opened {  // while it lives, the host may read and write the memory of some tensors
 public:
  explicit Opened(std::initializer_list<const Tensor*> tensors) {
    std::lock_guard<std::mutex> hold(guard_of_blocks);
    for (auto tensor : tensors) {
      auto block = block_of(tensor->unsafeGetTensorImpl()->unsafe_storage().data());
      if (block == nullptr)
        continue;
      if (block->second.open++ == 0)
        mprotect(block->first, block->second.bytes, PROT_READ | PROT_WRITE);
      opened_.push_back(block->first);
    }
  }
  ~Opened() {
    std::lock_guard<std::mutex> hold(guard_of_blocks);
    for (auto at : opened_) {
      auto& block = blocks.at(at);
      if (--block.open == 0)
        mprotect(at, block.bytes, PROT_NONE);
    }
  }

 private:
  std::vector<char*> opened_;
};

// ---- devices and streams ----

thread_local DeviceIndex current = 0;
thread_local std::map<DeviceIndex, c10::StreamId> streams;
std::atomic<c10::StreamId> last_stream{0};
DeviceIndex count = 1;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device to) const override {
    auto was = current;
    setDevice(to);
    return Device(KIND, was);
  }
  Device getDevice() const override { return Device(KIND, current); }
  void setDevice(Device to) const override {
    TORCH_CHECK(to.type() == KIND && to.index() < count, "no such device: ", to);
    if (to.index() >= 0)
      current = to.index();
  }
  void uncheckedSetDevice(Device to) const noexcept override { current = to.index(); }
  Stream getStream(Device of) const override {
    return Stream(Stream::UNSAFE, indexed(of), streams[indexed(of).index()]);
  }
  Stream getDefaultStream(Device of) const override {
    return Stream(Stream::UNSAFE, indexed(of), 0);
  }
  Stream getStreamFromGlobalPool(Device of, bool) const override { return getNewStream(of, 0); }
  Stream getNewStream(Device of, int) const override {
    return Stream(Stream::UNSAFE, indexed(of), ++last_stream);
  }
  Stream exchangeStream(Stream to) const override {
    auto was = getStream(to.device());
    streams[to.device_index()] = to.id();
    return was;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr)
      *event = new char;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<char*>(event);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return count; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}

 private:
  static Device indexed(Device of) {
    return of.index() < 0 ? Device(KIND, current) : of;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device device(KIND, current);
    if (bytes == 0)
      return {nullptr, nullptr, &give_back, device};
    auto at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "no memory for ", bytes, " bytes");
    std::lock_guard<std::mutex> hold(guard_of_blocks);
    blocks[static_cast<char*>(at)] = Block{(bytes + 4095) / 4096 * 4096};
    return {at, at, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::lock_guard<std::mutex> hold(guard_of_blocks);
    auto one = block_of(to), two = block_of(from);
    mprotect(one->first, one->second.bytes, PROT_READ | PROT_WRITE);
    mprotect(two->first, two->second.bytes, PROT_READ | PROT_WRITE);
    memcpy(to, from, bytes);
    if (!one->second.open) mprotect(one->first, one->second.bytes, PROT_NONE);
    if (!two->second.open) mprotect(two->first, two->second.bytes, PROT_NONE);
  }
};
Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory);

// ---- generators: each draws from one of the CPU's that nothing else draws from ----

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(KIND, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        drawn(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { drawn.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offsets here"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offsets here"); }
  uint64_t current_seed() const override { return drawn.current_seed(); }
  uint64_t seed() override { return drawn.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    drawn.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return drawn.unsafeGetGeneratorImpl()->get_state();
  }
  at::Generator drawn;

 private:
  Generator* clone_impl() const override {
    auto made = new Generator(device().index());
    made->drawn = drawn.clone();
    return made;
  }
};

const at::Generator& generator_of(DeviceIndex index) {
  static std::vector<at::Generator>* all = [] {
    auto made = new std::vector<at::Generator>;
    for (DeviceIndex at = 0; at < 16; ++at) {
      made->push_back(at::make_generator<Generator>(at));
      (*made)[at].set_current_seed(c10::default_rng_seed_val);
    }
    return made;
  }();
  return all->at(index < 0 ? current : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return generator_of(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  Device getDeviceFromPtr(void*) const override { return Device(KIND, current); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::DeviceType::CPU);
  }
  DeviceIndex deviceCount() const override { return count; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex to) const override { Guard().setDevice(Device(KIND, to)); }
  DeviceIndex exchangeDevice(DeviceIndex to) const override {
    return Guard().exchangeDevice(Device(KIND, to)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchangeDevice(to); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto self = storage.unsafeGetStorageImpl();
    c10::OptionalDeviceGuard on(self->device());
    auto made = memory.allocate(bytes);
    if (bytes && self->nbytes())
      memory.copy_data(made.get(), self->data(), std::min(bytes, self->nbytes()));
    self->set_data_ptr_noswap(std::move(made));
    self->set_nbytes(bytes);
  }
};

// ---- operators ----

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout, std::optional<Device> device,
             std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(c10::device_or_default(device));
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                     std::optional<Device> device, std::optional<bool> pin) {
  c10::DeviceGuard on(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor on_host(const Tensor& tensor) {
  if (tensor.is_cpu())
    return tensor;
  auto data = const_cast<void*>(tensor.unsafeGetTensorImpl()->unsafe_storage().data());
  auto at = static_cast<char*>(data) + tensor.storage_offset() * tensor.element_size();
  auto seen = at::from_blob(
      at, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
  seen.unsafeGetTensorImpl()->_set_conj(tensor.is_conj());
  seen.unsafeGetTensorImpl()->_set_neg(tensor.is_neg());
  return seen;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  if (to.numel() == 0)
    return to;
  Opened opened{&self, &to};
  auto target = on_host(to);
  at::native::copy_(target, on_host(self), false);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  at::native::resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Opened opened{&self};
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

Tensor& set_storage_at(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                       c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}

void record_stream(Tensor&, Stream) {}

// Writes running statistics, of which its schema says nothing: the fallback would drop them.
std::tuple<Tensor, Tensor, Tensor> batch_norm(
    const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mean, const std::optional<Tensor>& var, bool training,
    double momentum, double eps) {
  if (!mean || !mean->defined())
    return at::_native_batch_norm_legit(input, weight, bias, training, momentum, eps);
  auto mean_written = *mean, var_written = *var;
  return at::_native_batch_norm_legit(
      input, weight, bias, mean_written, var_written, training, momentum, eps);
}

// torch asks every device that is not its own for these two, and falls back to nothing.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                   bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  auto added = bias && bias->defined() ? std::optional(bias->cpu()) : std::nullopt;
  return at::convolution(input.cpu(), weight.cpu(), added, stride, padding, dilation, transposed,
                         output_padding, groups)
      .to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  auto bias = transposed ? weight.size(1) * groups : weight.size(0);
  auto [one, two, three] = at::convolution_backward(
      grad.cpu(), input.cpu(), weight.cpu(), at::OptionalIntArrayRef({bias}), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  auto back = [&](const Tensor& each) { return each.defined() ? each.to(input.device()) : each; };
  return {back(one), back(two), back(three)};
}

int64_t math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                       double, bool, std::optional<double>, bool) {
  return 0;
}

// The CPU's operator on copies; what draws draws from the device's generator.
void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) {
    at::native::cpu_fallback(op, stack);
    return;
  }
  const auto& arguments = op.schema().arguments();
  auto first = stack->size() - arguments.size();
  auto own = generator_of(-1);
  bool given = false;
  for (size_t at = 0; at < arguments.size(); ++at) {
    auto& value = (*stack)[first + at];
    if (value.isTensor() && value.toTensor().defined() &&
        value.toTensor().device().type() == KIND)
      own = generator_of(value.toTensor().device().index());
  }
  for (size_t at = 0; at < arguments.size(); ++at) {
    auto& value = (*stack)[first + at];
    if (value.isGenerator())
      own = value.toGenerator();
  }
  TORCH_CHECK(own.device().type() == KIND, "expected a generator of this device, not of ",
              own.device());
  auto drawn = static_cast<Generator*>(own.unsafeGetGeneratorImpl())->drawn;
  for (size_t at = 0; at < arguments.size(); ++at) {
    auto type = arguments[at].type();
    if (auto optional = type->cast<c10::OptionalType>(); optional)
      type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) {
      (*stack)[first + at] = drawn;
      given = true;
    }
  }
  if (given) {
    at::native::cpu_fallback(op, stack);
    return;
  }
  auto host = at::detail::getDefaultCPUGenerator();
  auto before = host.get_state();
  host.set_state(drawn.get_state());
  at::native::cpu_fallback(op, stack);
  drawn.set_state(host.get_state());
  host.set_state(before);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", math_attention);
  m.impl("native_batch_norm", batch_norm);
  // What it would be made of by default warns of a size that nobody gave it.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &math_attention);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("device_count", [] { return static_cast<int>(count); });
  m.def("set_device_count", [](int devices) { count = devices; });
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int to) { Guard().setDevice(Device(KIND, to)); });
  m.def("default_generator", [](int of) {
    return py::reinterpret_steal<py::object>(
        THPGenerator_initDefaultGenerator(generator_of(of)));
  });
}
