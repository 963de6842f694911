// Bytes that move: one tensor at a time for torch's operators, whole lists for the devconv backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace acme {

// Makes `target` hold the values of `source`, converting dtype, strides and shape (by broadcasting) on the way. At
// least one of the two is on an acme device, the other on one or on the host.
void copy_values(const at::Tensor& source, const at::Tensor& target);

// Detached copies on `device` (an acme device or the host), in one call. `dtypes` has one entry a tensor, or none.
// All or nothing: what was made before a failure is freed.
std::vector<at::Tensor> copy_list(
    const std::vector<at::Tensor>& sources, c10::Device device, const std::vector<c10::ScalarType>& dtypes);

// A CPU tensor over the bytes of a device tensor. Only for the driver's own work on them.
at::Tensor driver_view(const at::Tensor& tensor);

}  // namespace acme
