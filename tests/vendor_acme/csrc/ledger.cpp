#include "ledger.h"

#include "faults.h"

#include <algorithm>
#include <array>
#include <mutex>

namespace acme {
namespace {

std::mutex mutex;
std::array<Ledger, kMostDevices> ledgers;
thread_local bool in_fallback = false;

void add(Traffic& traffic, int64_t bytes) {
  traffic.copies += 1;
  traffic.bytes += bytes;
}

}  // namespace

Ledger read_ledger(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(mutex);
  return ledgers.at(device);
}

void reset_peak(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(mutex);
  ledgers.at(device).peak_bytes = ledgers.at(device).live_bytes;
}

void note_allocation(c10::DeviceIndex device, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  Ledger& ledger = ledgers.at(device);
  ledger.allocations += 1;
  ledger.live_blocks += 1;
  ledger.live_bytes += bytes;
  ledger.peak_bytes = std::max(ledger.peak_bytes, ledger.live_bytes);
}

void note_release(c10::DeviceIndex device, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  ledgers.at(device).live_blocks -= 1;
  ledgers.at(device).live_bytes -= bytes;
}

void note_batch(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(mutex);
  ledgers.at(device).batches += 1;
}

void note_copy(Direction direction, c10::DeviceIndex device, int64_t bytes) {
  if (!in_fallback) {
    fail_if_told(direction, device);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  Ledger& ledger = ledgers.at(device);
  if (in_fallback) {
    add(ledger.fallback, bytes);
  } else if (direction == Direction::kSend) {
    add(ledger.sent, bytes);
  } else if (direction == Direction::kFetch) {
    add(ledger.fetched, bytes);
  } else {
    add(ledger.copied, bytes);
  }
}

FallbackScope::FallbackScope(c10::DeviceIndex device) : outer_(in_fallback) {
  in_fallback = true;
  const std::lock_guard<std::mutex> lock(mutex);
  ledgers.at(device).fallback_calls += 1;
}

FallbackScope::~FallbackScope() {
  in_fallback = outer_;
}

}  // namespace acme
