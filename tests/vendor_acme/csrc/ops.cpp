// The operators that a device cannot borrow: making tensors, looking at them in other shapes, and moving their bytes.
#include "copy.h"
#include "device.h"
#include "faults.h"
#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace acme {
namespace {

// Torch lets `param.data = new` cross devices if both tensors are dense tensors of a backend on a list of its own, which
// lacks PrivateUse1. The way in by overriding aten::_has_compatible_shallow_copy_type works on torch 2.9 and is not
// asked any more on 2.13 (pytorch/pytorch#196975). A tensor of the set-data kind therefore carries the bit of a backend
// that is on the list. Nothing else changes: dispatch goes to the highest bit, which stays PrivateUse1.
c10::DispatchKeySet keys() {
  const c10::DispatchKeySet own(c10::DispatchKey::PrivateUse1);
  return shares_impl() ? own | c10::DispatchKeySet(c10::BackendComponent::MTIABit) : own;
}

c10::Device device_or_current(std::optional<c10::Device> device) {
  TORCH_CHECK(device_count() > 0, "no acme device is available");
  const c10::Device wanted = device.value_or(c10::Device(c10::DeviceType::PrivateUse1));
  return wanted.has_index() ? wanted : c10::Device(wanted.type(), current_device());
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> memory_format) {
  const c10::ScalarType scalar = c10::dtype_or_default(dtype);
  check_dtype(scalar);
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::kStrided, "acme holds strided tensors only");
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, allocator(), keys(), scalar, memory_format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::ScalarType scalar = c10::dtype_or_default(dtype);
  check_dtype(scalar);
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::kStrided, "acme holds strided tensors only");
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, allocator(), keys(), scalar);
}

// A kernel of its own, though torch's would do with _copy_from below: on the way there torch resolves lazy conjugates by
// copying them, which ends here again.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  copy_values(source, self);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  copy_values(self, target);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  copy_values(self, target);
  return target;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  at::Tensor value = at::empty({}, self.options().device(c10::kCPU));
  copy_values(self, value);
  return at::_local_scalar_dense(value);
}

void grow_storage(const at::Tensor& tensor, int64_t bytes) {
  if (static_cast<int64_t>(tensor.storage().nbytes()) < bytes) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), static_cast<size_t>(bytes));
  }
}

void set_geometry(const at::Tensor& tensor, c10::IntArrayRef size, at::OptionalIntArrayRef stride) {
  // The sizes only: torch's function would grow the storage with the host's memcpy.
  at::native::resize_impl_cpu_(tensor.unsafeGetTensorImpl(), size, stride, /*resize_storage=*/false);
  if (tensor.numel() > 0) {
    grow_storage(
        tensor,
        static_cast<int64_t>(at::detail::computeStorageNbytes(
            tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset())));
  }
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> memory_format) {
  set_geometry(self, size, std::nullopt);
  if (memory_format.has_value() && *memory_format != c10::MemoryFormat::Preserve) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*memory_format);
  }
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  set_geometry(self, size, stride.data() == nullptr ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(stride));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_whole_storage(
      self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  // Views are the same arithmetic on every strided device.
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
}

}  // namespace
}  // namespace acme
