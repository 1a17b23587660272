// The device `late` for torch: allocators, streams, copies, views and kernels of attention.
// Everything else runs on the CPU, on copies (`fallback`); its results arrive late, too.
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceType;
using Sizes = at::IntArrayRef;

constexpr auto LATE = DeviceType::PrivateUse1;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::int64_t current_stream[late::DEVICES] = {};
thread_local bool in_fallback = false; // what is copied up then belongs to nobody else

struct InFallback {
  bool before = std::exchange(in_fallback, true);
  ~InFallback() { in_fallback = before; }
};

late::Stream* stream_on(const Device& device) {
  int index = device.has_index() ? device.index() : current_device;
  return late::stream_of(index, current_stream[index]);
}

// ---- memory

struct Block { // what the storage of a tensor holds
  void* place;
  std::size_t nbytes;
  late::Stream* stream;
  std::set<late::Stream*> users; // other streams that use it, by `record_stream`
};

void poison(late::Stream* stream, void* place, std::size_t nbytes) {
  late::add(stream, [to = late::shadow(place), nbytes] { std::memset(to, late::POISON, nbytes); });
}

// As CUDA's allocator: freed memory waits for no other stream than its own and the recorded ones. It
// waits for all that these have been given when it is freed.
void free_block(void* given) {
  std::unique_ptr<Block> block(static_cast<Block*>(given));
  for (auto* user : block->users) {
    late::Event event;
    late::record(event, user);
    late::block(event, block->stream);
  }
  poison(block->stream, block->place, block->nbytes);
  late::add(block->stream, [place = block->place] { late::release(place); });
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t nbytes) override {
    Device device(LATE, current_device);
    if (nbytes == 0) return {nullptr, nullptr, nullptr, device};
    auto* block = new Block{late::allocate(nbytes), nbytes, stream_on(device), {}};
    poison(block->stream, block->place, nbytes);
    return {block->place, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "late: storages cannot be copied");
  }
};

void free_pinned(void* place) {
  late::unpin(place);
  std::free(place);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t nbytes) override {
    void* place = std::aligned_alloc(64, (nbytes / 64 + 1) * 64);
    std::memset(place, late::POISON, nbytes);
    late::pin(place, nbytes);
    return {place, place, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* into, const void* part, std::size_t nbytes) const override {
    std::memcpy(into, part, nbytes);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(LATE, &device_allocator);

// ---- devices, streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = LATE;
  static late::Stream* native(const c10::Stream& stream) {
    return late::stream_of(stream.device_index(), stream.id());
  }
  static c10::Stream named(const late::Stream* stream) {
    Device device(LATE, static_cast<c10::DeviceIndex>(stream->device));
    return c10::Stream(c10::Stream::UNSAFE, device, stream->id);
  }
  DeviceType type() const override { return LATE; }
  c10::DeviceIndex deviceCount() const noexcept override { return late::DEVICES; }
  Device getDevice() const override { return {LATE, current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < late::DEVICES, "late: there are ", late::DEVICES, " devices");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(Device device) const override { return named(stream_on(device)); }
  c10::Stream getDefaultStream(Device device) const override {
    return named(late::stream_of(device.has_index() ? device.index() : current_device, 0));
  }
  c10::Stream getNewStream(Device device, int) const override {
    return named(late::new_stream(device.has_index() ? device.index() : current_device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return native(stream); }
  bool queryStream(const c10::Stream& stream) const override { return late::query(native(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    late::run_all(native(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { late::run_device(device); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<late::Event*>(event);
  }
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex device,
      const c10::EventFlag) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(), "late: the event belongs to device ",
        device, ", the stream to device ", stream.device_index());
    if (!*event) *event = new late::Event;
    late::record(*static_cast<late::Event*>(*event), native(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) late::block(*static_cast<late::Event*>(event), native(stream));
  }
  bool queryEvent(void* event) const override {
    return !event || late::query(*static_cast<late::Event*>(event));
  }
  void synchronizeEvent(void* given) const override {
    auto* event = static_cast<late::Event*>(given);
    if (event && event->stream) late::run_to(event->stream, event->point);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    auto* block = static_cast<Block*>(data.get_context());
    if (!block || data.get_deleter() != &free_block) return;
    if (native(stream) != block->stream) block->users.insert(native(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random numbers are the CPU's: `fallback` takes the generator inside.
struct Generator final : c10::GeneratorImpl {
  at::Generator inside = at::make_generator<at::CPUGeneratorImpl>();
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl(Device(LATE, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(std::uint64_t seed) override { inside.set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { inside.set_offset(offset); }
  std::uint64_t get_offset() const override { return inside.get_offset(); }
  std::uint64_t current_seed() const override { return inside.current_seed(); }
  std::uint64_t seed() override { return inside.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inside.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inside.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->inside = inside.clone();
    return made;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index);
  }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return late::DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchangeDevice(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({LATE, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return late::is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

Hooks hooks;
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// ---- copies

// View the memory of a device tensor as a tensor of the host, for kernels only.
Tensor open(const Tensor& x) {
  void* place = x.numel() ? late::shadow(x.data_ptr()) : nullptr;
  TORCH_CHECK(place || !x.numel(), "late: ", x.data_ptr(), " is no memory of this device");
  return at::from_blob(place, x.sizes(), x.strides(), x.options().device(at::kCPU));
}

void copy_now(const Tensor& into, const Tensor& part) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_python(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  into.copy_(part);
}

Tensor copy_from(const Tensor& part, const Tensor& into, bool non_blocking) {
  bool down = into.is_cpu(), up = part.is_cpu();
  auto* stream = stream_on((down ? part : into).device());
  if (down) {
    late::add(stream, [into = into.detach(), part = open(part)] { copy_now(into, part); });
    if (!non_blocking || !into.is_pinned()) late::run_all(stream);
    return into;
  }
  // Pageable memory is read before the call returns. Pinned memory stays until the copy was made.
  bool is_kept = !up || in_fallback || (non_blocking && part.is_pinned());
  Tensor from = up ? (is_kept ? part.detach() : part.clone()) : open(part);
  if (!up && part.device() != into.device()) {
    late::Event event; // the stream of the other device goes first
    late::record(event, stream_on(part.device()));
    late::block(event, stream);
  }
  late::add(stream, [into = open(into), from] { copy_now(into, from); });
  if (up && !non_blocking && !in_fallback) late::run_all(stream);
  return into;
}

void record_stream(Tensor& x, c10::Stream stream) {
  Guard().recordDataPtrOnStream(x.storage().data_ptr(), stream);
}

at::Scalar local_scalar(const Tensor& x) { return x.cpu().item(); }

// ---- making and viewing

using Bool = std::optional<bool>;

Tensor empty(
    Sizes sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, Bool, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(
      sizes, &device_allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    Sizes sizes, Sizes strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, Bool) {
  c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator, keys, c10::dtype_or_default(dtype));
}

const Tensor& resize_storage(const Tensor& x, Sizes sizes, std::optional<at::MemoryFormat>) {
  auto* impl = x.unsafeGetTensorImpl();
  auto nbytes = at::detail::computeStorageNbytesContiguous(
      sizes, x.element_size(), static_cast<std::size_t>(x.storage_offset()));
  if (nbytes > x.storage().nbytes()) {
    c10::DeviceGuard guard(x.device());
    auto fresh = device_allocator.allocate(nbytes);
    if (x.storage().nbytes())
      late::add(
          stream_on(x.device()),
          [to = late::shadow(fresh.get()), from = late::shadow(x.storage().data()),
           size = x.storage().nbytes()] { std::memmove(to, from, size); });
    x.storage().set_data_ptr_noswap(std::move(fresh));
    x.storage().set_nbytes(nbytes);
  }
  impl->set_sizes_contiguous(sizes);
  return x;
}

Tensor copy_from_and_resize(const Tensor& part, const Tensor& into) {
  if (part.sizes() != into.sizes()) resize_storage(into, part.sizes(), {});
  return copy_from(part, into, false);
}

Tensor& set_storage(Tensor& x, at::Storage source, std::int64_t offset, Sizes sizes, Sizes strides) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  x.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return x;
}

Tensor& set_whole_storage(Tensor& x, at::Storage source) {
  auto count = static_cast<std::int64_t>(source.nbytes() / x.element_size());
  return set_storage(x, std::move(source), 0, {count}, {1});
}

// CUDA's kernels take from the host only scalars, and positions of `index`.
void demand_one_device(const std::string& name, const c10::IValue& given) {
  if (given.isTensorList()) {
    for (const Tensor& x : given.toTensorVector()) demand_one_device(name, x);
  } else if (given.isTensor() && given.toTensor().defined()) {
    const Tensor& x = given.toTensor();
    bool is_scalar = x.is_cpu() && x.dim() == 0, is_index = name.rfind("aten::index", 0) == 0;
    TORCH_CHECK(!x.is_cpu() || is_scalar || is_index, name, ": Expected all tensors to be on the same device");
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  InFallback now;
  for (auto place = stack->size() - op.schema().arguments().size(); place < stack->size(); place++) {
    auto& given = (*stack)[place];
    demand_one_device(op.schema().name(), given);
    if (given.isGenerator() && given.toGenerator().device().type() == LATE)
      given = given.toGenerator().get<Generator>()->inside;
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// ---- kernels of attention, with the demands and the layouts of CUDA's

using Scale = std::optional<double>;

void demand_alignment(std::initializer_list<Tensor> tensors) {
  for (const Tensor& x : tensors) {
    TORCH_CHECK(x.stride(-1) == 1, "late: misaligned address: the last dim is not dense");
    auto place = reinterpret_cast<std::uintptr_t>(x.data_ptr());
    for (std::int64_t dim = 0; dim < x.dim() - 1; dim++)
      place |= x.size(dim) > 1 ? x.stride(dim) * x.element_size() : 0;
    TORCH_CHECK(place % late::ALIGNMENT == 0, "late: misaligned address");
  }
}

Tensor up(const Tensor& x, const Device& device) {
  InFallback now;
  return x.to(device);
}

// The state of random numbers: scalars, as CUDA's.
Tensor nothing(const Tensor& like) { return at::empty({}, like.options().dtype(at::kLong)); }

using Maybe = std::optional<Tensor>;

// The bias of a kernel on the CPU, if there is one; of the scores' shape, and in aligned rows.
Maybe bias_of(const Maybe& bias, const Tensor& q, const Tensor& k) {
  if (!bias || !bias->defined()) return {};
  demand_alignment({*bias});
  TORCH_CHECK(bias->scalar_type() == q.scalar_type(), "late: a bias has the dtype of q");
  std::vector<std::int64_t> shape{q.size(0), q.size(1), q.size(2), k.size(2)};
  TORCH_CHECK(bias->sizes() == Sizes(shape), "late: a bias has the shape of the scores");
  return bias->cpu();
}

std::tuple<Tensor, Tensor> attend(
    const Tensor& q, const Tensor& k, const Tensor& v, bool causal, Scale scale,
    const Maybe& bias = {}) {
  demand_alignment({q, k, v});
  TORCH_CHECK(!causal || q.size(2) == k.size(2), "late: causal blocks are square");
  return at::_scaled_dot_product_flash_attention_for_cpu(
      q.cpu(), k.cpu(), v.cpu(), 0.0, causal, bias_of(bias, q, k), scale);
}

// CUDA's kernels sum in float32. That on the CPU sums in the dtype that it is given.
std::tuple<Tensor, Tensor, Tensor> attend_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, bool causal, Scale scale, const Maybe& bias = {}) {
  demand_alignment({grad, q, k, v, out});
  const auto type = q.scalar_type();
  const auto wide = [type](const Tensor& x) { return x.cpu().to(c10::promoteTypes(type, at::kFloat)); };
  auto added = bias_of(bias, q, k);
  if (added) added = wide(*added);
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      wide(grad), wide(q), wide(k), wide(v), wide(out), lse.cpu(), 0.0, causal, added, scale);
  return {up(dq.to(type), q.device()), up(dk.to(type), q.device()), up(dv.to(type), q.device())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& q, const Tensor& k, const Tensor& v, double, bool causal, bool, Scale scale) {
  TORCH_CHECK(at::isReducedFloatingType(q.scalar_type()), "late: flash takes half precision only");
  TORCH_CHECK(q.size(3) % 8 == 0 && q.size(3) <= 256, "late: no such head dim in flash");
  auto [out, lse] = attend(q, k, v, causal, scale);
  return {up(out, q.device()), up(lse, q.device()), Tensor(),   Tensor(),  q.size(2),
          k.size(2),           nothing(q),          nothing(q), nothing(q)};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool causal,
    const Tensor&, const Tensor&, Scale scale) {
  return attend_backward(grad, q, k, v, out, lse, causal, scale);
}

// As flash, but the lse has a dim of length 1 at the end.
std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> cudnn(
    const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& bias, bool with_lse, double,
    bool causal, bool, Scale scale) {
  TORCH_CHECK(at::isReducedFloatingType(q.scalar_type()), "late: cudnn takes half precision only");
  TORCH_CHECK(q.size(3) % 8 == 0 && q.size(3) <= 128, "late: no such head dim in cudnn");
  TORCH_CHECK(with_lse && !bias, "late: cudnn is called otherwise");
  auto [out, lse] = attend(q, k, v, causal, scale);
  return {up(out, q.device()), up(lse.unsqueeze(-1), q.device()), Tensor(),   Tensor(), q.size(2),
          k.size(2),           nothing(q),                        nothing(q), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
    c10::SymInt, c10::SymInt, double, bool causal, Scale scale) {
  TORCH_CHECK(lse.dim() == 4 && lse.is_contiguous(), "late: cudnn reads the lse as (B, H, Sq, 1)");
  return attend_backward(grad, q, k, v, out, lse.squeeze(-1), causal, scale);
}

// What the kernels of sequences get: (tokens, H, D), and where the sequences end. Their other
// arguments differ by the version of torch, so these kernels take a stack.
struct Sequences {
  const at::ArrayRef<c10::IValue> given;
  const std::size_t tensors; // before the ends
  Scale scale;
  Sequences(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::size_t tensors)
      : given(torch::jit::last(*stack, op.schema().arguments().size())), tensors(tensors) {
    scale = given[*op.schema().argumentIndexWithName("scale")].toOptional<double>();
    auto q = at(0), ends = given[tensors].toTensor().cpu();
    TORCH_CHECK(at::isReducedFloatingType(q.scalar_type()), "late: flash takes half precision");
    TORCH_CHECK(ends.scalar_type() == at::kInt, "late: the ends of sequences are int32");
    auto longest = ends.diff().max().item<std::int64_t>();
    TORCH_CHECK(given[tensors + 2].toInt() == longest, "late: another length is the greatest");
    TORCH_CHECK(ends[-1].item<std::int64_t>() == q.size(0), "late: sequences end elsewhere");
  }
  Tensor at(std::size_t number) const { return given[number].toTensor(); }
  bool causal() const { return given[tensors + 5].toBool(); }
  // The parts of a tensor, (1, H, tokens, D), by the ends of queries (0) or keys (1).
  std::vector<Tensor> parts(const Tensor& x, std::size_t side) const {
    auto ends = at(tensors + side).cpu();
    std::vector<Tensor> found;
    for (std::int64_t n = 1; n < ends.size(0); n++) {
      auto start = ends[n - 1].item<std::int64_t>(), stop = ends[n].item<std::int64_t>();
      found.push_back(x.slice(0, start, stop).unsqueeze(0).transpose(1, 2));
    }
    return found;
  }
};

Tensor joined(const std::vector<Tensor>& parts) { // the reverse of `parts`
  std::vector<Tensor> rows;
  for (const Tensor& x : parts) rows.push_back(x.transpose(1, 2).squeeze(0));
  return at::cat(rows);
}

void flash_sequences(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Sequences all(op, stack, 3);
  auto q = all.parts(all.at(0), 0), k = all.parts(all.at(1), 1), v = all.parts(all.at(2), 1);
  std::vector<Tensor> outs, lses;
  for (std::size_t n = 0; n < q.size(); n++) {
    auto [out, lse] = attend(q[n], k[n], v[n], all.causal(), all.scale);
    outs.push_back(out);
    lses.push_back(lse.squeeze(0));
  }
  auto like = all.at(0);
  auto out = up(joined(outs), like.device()), lse = up(at::cat(lses, 1), like.device());
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, out, lse, nothing(like), nothing(like), nothing(like));
}

void flash_sequences_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Sequences all(op, stack, 6);
  std::vector<std::vector<Tensor>> x;
  for (std::size_t n : {0, 1, 2, 3, 4}) x.push_back(all.parts(all.at(n), n == 2 || n == 3));
  auto lse = all.parts(all.at(5).t().unsqueeze(-1), 0); // (1, H, tokens, 1)
  std::vector<Tensor> dqs, dks, dvs;
  for (std::size_t n = 0; n < x[0].size(); n++) {
    auto row = lse[n].squeeze(-1);
    auto [dq, dk, dv] = attend_backward(
        x[0][n], x[1][n], x[2][n], x[3][n], x[4][n], row, all.causal(), all.scale);
    dqs.push_back(dq);
    dks.push_back(dk);
    dvs.push_back(dv);
  }
  auto dq = joined(dqs), dk = joined(dks), dv = joined(dvs);
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, dq, dk, dv);
}

constexpr std::int64_t LSE_ROWS = 32;

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(
    const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& bias, bool, double,
    bool causal, Scale scale) {
  TORCH_CHECK(q.size(1) == k.size(1), "late: efficient takes as many key heads as query heads");
  TORCH_CHECK(q.scalar_type() != at::kDouble, "late: efficient takes no float64");
  auto [out, lse] = attend(q, k, v, causal, scale, bias);
  out = out.transpose(1, 2).contiguous().transpose(1, 2); // whatever the layout of q
  auto missing = (LSE_ROWS - lse.size(2) % LSE_ROWS) % LSE_ROWS;
  lse = at::constant_pad_nd(lse, {0, missing}, std::numeric_limits<double>::infinity());
  return {up(out, q.device()), up(lse, q.device()), nothing(q), nothing(q)};
}

// In half precision it reads `out` as if it lay in memory as (B, S, H, D), whatever its strides are.
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
    const Tensor& out, const Tensor& lse, const Tensor&, const Tensor&, double,
    std::array<bool, 4>, bool causal, Scale scale) {
  TORCH_CHECK(lse.size(2) % LSE_ROWS == 0, "late: the lse of efficient has whole rows of 32");
  auto h = out.size(1), s = out.size(2), d = out.size(3);
  auto read = out;
  if (at::isReducedFloatingType(q.scalar_type()))
    read = out.as_strided(out.sizes(), {s * h * d, d, h * d, 1});
  auto [dq, dk, dv] =
      attend_backward(grad, q, k, v, read, lse.slice(2, 0, q.size(2)), causal, scale, bias);
  return {dq, dk, dv, Tensor()};
}

// Which kernel torch's own attention takes; it would call flash on CUDA alone. cuDNN's is chosen for
// some head dims, so that all kernels are tried.
std::int64_t choose_kernel(
    const Tensor& q, const Tensor& k, const Tensor&, const Maybe& bias, double dropout,
    bool causal, Scale, bool) {
  bool plain = bias || dropout > 0 || q.scalar_type() == at::kDouble || q.size(1) != k.size(1) ||
      q.size(3) % 8 != 0 || (causal && q.size(2) != k.size(2));
  bool has_cudnn = at::isReducedFloatingType(q.scalar_type()) && q.size(3) % 16 == 0 &&
      q.size(3) <= 128 && !bias && dropout == 0 && !(causal && q.size(2) != k.size(2));
  return static_cast<std::int64_t>(
      has_cudnn ? at::SDPBackend::cudnn_attention
      : plain   ? at::SDPBackend::math
                : at::SDPBackend::efficient_attention);
}

} // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_kernel)
} // namespace at::native

namespace {

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_storage);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("_scaled_dot_product_flash_attention", &flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  m.impl(
      "_flash_attention_forward", torch::CppFunction::makeFromBoxedFunction<&flash_sequences>());
  m.impl(
      "_flash_attention_backward",
      torch::CppFunction::makeFromBoxedFunction<&flash_sequences_backward>());
  m.impl("_fused_sdp_choice", &choose_kernel);
  m.impl("_scaled_dot_product_cudnn_attention", &cudnn);
  m.impl("_scaled_dot_product_cudnn_attention_backward", &cudnn_backward);
  m.impl("_scaled_dot_product_efficient_attention", &efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Autocast lowers and raises the dtypes of the same operations as on CUDA.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWERED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define RAISED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWERED)
  AT_FORALL_FP32(RAISED)
}

} // namespace
