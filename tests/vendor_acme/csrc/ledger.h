// What the device did, counted exactly: tests prove transfers and leaks by these numbers.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace acme {

constexpr c10::DeviceIndex kMostDevices = 8;

enum class Direction { kSend, kFetch, kCopy };  // host to device, device to host, device to device

struct Traffic {
  int64_t copies = 0;
  int64_t bytes = 0;
};

struct Ledger {
  int64_t allocations = 0;
  int64_t live_blocks = 0;
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;
  Traffic sent;      // on the device that received
  Traffic fetched;   // on the device that was read
  Traffic copied;    // on the device that received
  Traffic fallback;  // copies that the CPU fallback made for itself, in both directions
  int64_t batches = 0;          // lists of tensors that crossed in one call
  int64_t fallback_calls = 0;   // operators that ran on the host
};

Ledger read_ledger(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);

void note_allocation(c10::DeviceIndex device, int64_t bytes);
void note_release(c10::DeviceIndex device, int64_t bytes);
void note_batch(c10::DeviceIndex device);

// Counts one copy, and raises instead where that copy is told to fail (see faults.h). Called before the bytes move.
void note_copy(Direction direction, c10::DeviceIndex device, int64_t bytes);

// While one lives, this thread's copies belong to the CPU fallback: they are counted apart and never told to fail, so
// that "copy k" stays the k-th copy that somebody asked for.
class FallbackScope {
 public:
  explicit FallbackScope(c10::DeviceIndex device);
  ~FallbackScope();
  FallbackScope(const FallbackScope&) = delete;
  FallbackScope& operator=(const FallbackScope&) = delete;

 private:
  bool outer_;
};

}  // namespace acme
