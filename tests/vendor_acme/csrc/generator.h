// Random numbers: every device has its own generator, so seeding the host's alone does not reach it.
#pragma once

#include <ATen/core/Generator.h>

namespace acme {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// The stream of numbers behind an acme generator, in the form that kernels of the host can draw from.
at::Generator host_stream(const at::Generator& generator);

}  // namespace acme
