// Every operator without a kernel of its own runs on the host: operands are copied there and results copied back.
#include "device.h"
#include "generator.h"
#include "ledger.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm_ops.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include <string>

namespace acme {
namespace {

// What one call's operands say about where it runs.
struct Operands {
  std::optional<c10::Device> device;
  bool host = false;  // a CPU tensor with dimensions is among them

  void see(const at::Tensor& tensor, const c10::OperatorHandle& op) {
    if (!tensor.defined()) {
      return;
    }
    if (tensor.is_privateuseone()) {
      TORCH_CHECK(
          !device.has_value() || *device == tensor.device(),
          "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
          tensor.device(), "! (in ", op.operator_name(), ")");
      device = tensor.device();
    } else if (tensor.is_cpu() && tensor.dim() > 0) {
      host = true;
    }
  }
};

// The host could compute with operands from anywhere. A device cannot, and a parameter that was left behind has to
// show, so mixed operands are refused here as a device's own kernels would. Indexing takes indices from the host.
c10::Device check_operands(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  Operands operands;
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) {
      operands.see(value.toTensor(), op);
    } else if (value.isTensorList() || value.isOptionalTensorList() || value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor()) {
          operands.see(element.toTensor(), op);
        }
      }
    }
  }
  const std::string& name = op.operator_name().name;
  const bool takes_host_indices = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0 ||
      name.rfind("aten::_unsafe_index", 0) == 0;
  TORCH_CHECK(
      !(operands.device.has_value() && operands.host) || takes_host_indices,
      "Expected all tensors to be on the same device, but found at least two devices, ", *operands.device,
      " and cpu! (in ", op.operator_name(), ")");
  return operands.device.value_or(c10::Device(c10::DeviceType::PrivateUse1, current_device()));
}

// Kernels of the host draw from CPU generators: give them the stream of the device's generator.
void lend_generator(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::Device device) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isGenerator()) {
      value = host_stream(value.toGenerator());
    } else if (value.isNone() && arguments[i].type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
      value = host_stream(default_generator(device.index()));
    }
  }
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::Device device = check_operands(op, *stack);
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    lend_generator(op, stack, device);
  }
  const FallbackScope scope(device.index());
  // An operator that returns a view of its operand cannot be served by copies: refuse it rather than be quietly wrong.
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  return at::native::call_fallback_fn_symint<&fall_back, at::_ops::convolution>::call(
      input, weight, bias, stride, padding, dilation, transposed, output_padding, std::move(groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  const std::vector<c10::SymInt> bias_sizes{weight.sym_size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  return at::native::call_fallback_fn_symint<&fall_back, at::_ops::convolution_backward>::call(
      grad, input, weight, c10::SymIntArrayRef(bias_sizes), stride, padding, dilation, transposed, output_padding,
      groups, mask);
}

// Its schema does not say that it updates the running statistics, so the fallback would not copy them back. The
// operator of the next line does say so.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  if (mean.has_value() && mean->defined() && variance.has_value() && variance->defined()) {
    at::Tensor running_mean = *mean;
    at::Tensor running_variance = *variance;
    return at::_native_batch_norm_legit(
        input, weight, bias, running_mean, running_variance, training, momentum, eps);
  }
  return at::native::call_fallback_fn<&fall_back, at::_ops::native_batch_norm>::call(
      input, weight, bias, mean, variance, training, momentum, eps);
}

// It has no generator argument to lend, so the mask is drawn by an operator that has one.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(c10::kBool))};
  }
  const at::Tensor mask = at::empty_like(input, input.options().dtype(c10::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  m.impl("native_batch_norm", TORCH_FN(batch_norm));
  m.impl("native_dropout", TORCH_FN(dropout));
}

}  // namespace
}  // namespace acme
