#include "faults.h"

#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>

namespace acme {
namespace {

std::array<std::atomic<int64_t>, kMostDevices> limits = [] {
  return std::array<std::atomic<int64_t>, kMostDevices>{
      kBytesPerDevice, kBytesPerDevice, kBytesPerDevice, kBytesPerDevice,
      kBytesPerDevice, kBytesPerDevice, kBytesPerDevice, kBytesPerDevice};
}();
std::atomic<int64_t> copies_to_failure{0};  // 0: none is told to fail
std::atomic<bool> keep_failing{false};
std::atomic<bool> no_float64{false};
std::atomic<bool> set_data_kind{false};

const char* name(Direction direction) {
  switch (direction) {
    case Direction::kSend:
      return "from the host";
    case Direction::kFetch:
      return "to the host";
    default:
      return "between devices";
  }
}

}  // namespace

void set_memory_limit(c10::DeviceIndex device, int64_t bytes) {
  limits.at(device) = std::min(bytes, kBytesPerDevice);
}

int64_t memory_limit(c10::DeviceIndex device) {
  return limits.at(device);
}

void fail_copy(int64_t ordinal, bool from_there_on) {
  keep_failing = from_there_on;
  copies_to_failure = ordinal;
}

void fail_if_told(Direction direction, c10::DeviceIndex device) {
  int64_t left = copies_to_failure;
  // Two threads may copy at once; exactly one of them gets the failing number.
  while (left > 0) {
    const int64_t next = left == 1 && keep_failing ? 1 : left - 1;
    if (copies_to_failure.compare_exchange_weak(left, next)) {
      TORCH_CHECK(left != 1, "acme:", static_cast<int>(device), ": a copy ", name(direction), " failed, as it was told to");
      return;
    }
  }
}

void set_refuses_float64(bool refuses) {
  no_float64 = refuses;
}

bool refuses_float64() {
  return no_float64;
}

void check_dtype(c10::ScalarType dtype) {
  const bool wide = dtype == c10::ScalarType::Double || dtype == c10::ScalarType::ComplexDouble;
  TORCH_CHECK_TYPE(!(wide && no_float64), "this acme device has no 64-bit floats (asked for ", dtype, ")");
}

void set_shares_impl(bool shares) {
  set_data_kind = shares;
}

bool shares_impl() {
  return set_data_kind;
}

}  // namespace acme
