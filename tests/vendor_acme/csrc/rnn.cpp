// The fused cells that torch's LSTM and GRU call on every device of the PrivateUse1 slot. The host has no kernel for
// them, so the CPU fallback cannot help; they are composed of operators that it can run.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace acme {
namespace {

at::Tensor with_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

at::Tensor or_zeros(const std::optional<at::Tensor>& grad, const at::Tensor& like) {
  return grad.has_value() && grad->defined() ? *grad : like * 0;
}

at::Tensor sigmoid_slope(const at::Tensor& activated) {
  return activated * (1 - activated);
}

at::Tensor tanh_slope(const at::Tensor& activated) {
  return 1 - activated * activated;
}

// The workspace is what the backward pass needs: the activated gates, in torch's order.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const at::Tensor in = gates[0].sigmoid();
  const at::Tensor forget = gates[1].sigmoid();
  const at::Tensor cell = gates[2].tanh();
  const at::Tensor out = gates[3].sigmoid();
  const at::Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy, const at::Tensor& cx,
    const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const at::Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const at::Tensor squashed = cy.tanh();
  const at::Tensor to_hy = or_zeros(grad_hy, cy);
  const at::Tensor to_cy = to_hy * out * tanh_slope(squashed) + or_zeros(grad_cy, cy);
  const at::Tensor to_gates = at::cat(
      {to_cy * cell * sigmoid_slope(in), to_cy * cx * sigmoid_slope(forget), to_cy * in * tanh_slope(cell),
       to_hy * squashed * sigmoid_slope(out)},
      1);
  return {to_gates, to_cy * forget, has_bias ? to_gates.sum(0) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hx,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const at::Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  const at::Tensor update = (from_input[1] + from_hidden[1]).sigmoid();
  const at::Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad_hy, const at::Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const at::Tensor &reset = saved[0], &update = saved[1], &fresh = saved[2], &hx = saved[3], &hidden = saved[4];
  const at::Tensor to_update = grad_hy * (hx - fresh) * sigmoid_slope(update);
  const at::Tensor to_fresh = grad_hy * (1 - update) * tanh_slope(fresh);
  const at::Tensor to_reset = to_fresh * hidden * sigmoid_slope(reset);
  const at::Tensor to_input_gates = at::cat({to_reset, to_update, to_fresh}, 1);
  const at::Tensor to_hidden_gates = at::cat({to_reset, to_update, to_fresh * reset}, 1);
  return {
      to_input_gates, to_hidden_gates, grad_hy * update, has_bias ? to_input_gates.sum(0) : at::Tensor(),
      has_bias ? to_hidden_gates.sum(0) : at::Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

}  // namespace
}  // namespace acme
