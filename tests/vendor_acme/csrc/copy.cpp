#include "copy.h"

#include "ledger.h"
#include "memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

namespace acme {

at::Tensor driver_view(const at::Tensor& tensor) {
  const auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  const auto sizes = tensor.sizes();
  at::Tensor view;
  if (tensor.numel() == 0) {
    view = at::empty_strided(sizes, tensor.strides(), options);
  } else {
    view = at::from_blob(driver_address(tensor.data_ptr()), sizes, tensor.strides(), options);
  }
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

void copy_values(const at::Tensor& source, const at::Tensor& target) {
  const bool from_host = source.is_cpu();
  const bool to_host = target.is_cpu();
  TORCH_CHECK_NOT_IMPLEMENTED(
      (from_host || source.is_privateuseone()) && (to_host || target.is_privateuseone()),
      "acme copies between its devices and the host, not from ", source.device(), " to ", target.device());
  TORCH_CHECK_NOT_IMPLEMENTED(
      source.layout() == c10::kStrided && target.layout() == c10::kStrided, "acme holds strided tensors only");
  if (target.numel() == 0) {
    return;
  }
  const int64_t bytes = static_cast<int64_t>(target.numel() * target.element_size());
  if (from_host) {
    note_copy(Direction::kSend, target.device().index(), bytes);
  } else if (to_host) {
    note_copy(Direction::kFetch, source.device().index(), bytes);
  } else {
    note_copy(Direction::kCopy, target.device().index(), bytes);
  }
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  at::Tensor destination = to_host ? target : driver_view(target);
  destination.copy_(from_host ? source : driver_view(source));
}

std::vector<at::Tensor> copy_list(
    const std::vector<at::Tensor>& sources, c10::Device device, const std::vector<c10::ScalarType>& dtypes) {
  TORCH_CHECK(dtypes.empty() || dtypes.size() == sources.size(), "one dtype a tensor, or none");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  std::vector<at::Tensor> copies;
  copies.reserve(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    const at::Tensor& source = sources[i];
    TORCH_CHECK_NOT_IMPLEMENTED(
        source.layout() == c10::kStrided, "acme holds strided tensors only, got ", source.layout());
    const auto options = source.options().device(device).dtype(dtypes.empty() ? source.scalar_type() : dtypes[i]);
    copies.push_back(at::empty_like(source, options, c10::MemoryFormat::Preserve));
    copy_values(source, copies.back());
  }
  const bool to_host = device.is_cpu();
  if (!sources.empty()) {
    note_batch(to_host ? sources.front().device().index() : device.index());
  }
  return copies;
}

}  // namespace acme
