// The extension module torch_acme._C. Importing it registers the device with torch.
#include "copy.h"
#include "device.h"
#include "faults.h"
#include "generator.h"
#include "ledger.h"
#include "memory.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace {

// Keys as in torch_acme.Ledger.
py::dict as_dict(const acme::Ledger& ledger) {
  using namespace py::literals;
  const auto pair = [](const acme::Traffic& traffic) { return py::make_tuple(traffic.copies, traffic.bytes); };
  return py::dict(
      "allocations"_a = ledger.allocations, "live_blocks"_a = ledger.live_blocks, "live_bytes"_a = ledger.live_bytes,
      "peak_bytes"_a = ledger.peak_bytes, "sent"_a = pair(ledger.sent), "fetched"_a = pair(ledger.fetched),
      "copied"_a = pair(ledger.copied), "batches"_a = ledger.batches, "fallback"_a = pair(ledger.fallback),
      "fallback_calls"_a = ledger.fallback_calls);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace acme;

  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("has_context", &has_context);
  m.def("default_generator", &default_generator);

  m.def("copy_list", &copy_list, py::call_guard<py::gil_scoped_release>());

  m.def("read_ledger", [](c10::DeviceIndex device) { return as_dict(read_ledger(device)); });
  m.def("reset_peak", &reset_peak);

  m.def("set_memory_limit", &set_memory_limit);
  m.def("memory_limit", &memory_limit);
  m.def("fail_copy", &fail_copy);
  m.def("set_refuses_float64", &set_refuses_float64);
  m.def("refuses_float64", &refuses_float64);
  m.def("set_shares_impl", &set_shares_impl);
  m.def("shares_impl", &shares_impl);
  m.attr("bytes_per_device") = kBytesPerDevice;
}
