// torch.autocast("acme"): the operators of a network that run in half precision, and those that need float32.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

// Declared in ATen/autocast_mode.h, which includes all of torch and would make this file the slowest of the build.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(c10::DeviceType device_type);
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
}  // namespace at::autocast

namespace acme {
namespace {

constexpr auto kAcme = c10::DeviceType::PrivateUse1;

void run_in(at::ScalarType dtype, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  for (auto value = stack->end() - static_cast<int64_t>(op.schema().arguments().size()); value != stack->end(); ++value) {
    if (value->isTensor() && value->toTensor().defined()) {
      *value = at::autocast::cached_cast(dtype, value->toTensor(), kAcme);
    }
  }
  op.callBoxed(stack);
}

void in_half(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_in(at::autocast::get_autocast_dtype(kAcme), op, stack);
}

void in_float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_in(at::kFloat, op, stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name :
       {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_convolution", "conv1d", "conv1d.padding",
        "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "conv_transpose1d", "conv_transpose2d.input",
        "conv_transpose3d.input", "scaled_dot_product_attention", "prelu", "lstm_cell", "gru_cell"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_half>());
  }
  for (const char* name :
       {"exp", "log", "pow.Tensor_Scalar", "softmax.int", "log_softmax.int", "layer_norm", "group_norm", "mse_loss",
        "l1_loss", "smooth_l1_loss", "nll_loss", "cross_entropy_loss", "binary_cross_entropy_with_logits", "norm.Scalar",
        "cumsum", "prod", "sum"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float32>());
  }
}

}  // namespace
}  // namespace acme
