// The device's memory: real bytes behind addresses that the host cannot read.
#pragma once

#include "ledger.h"

#include <c10/core/Allocator.h>

#include <cstdint>

namespace acme {

constexpr int64_t kBytesPerDevice = int64_t{1} << 33;

// Allocates on the calling thread's current device.
c10::Allocator* allocator();

// Where the driver (and nobody else) may touch the bytes at a device address.
void* driver_address(const void* device_address);

// The device that owns an address, -1 for an address that is no device's.
c10::DeviceIndex owner(const void* device_address);

}  // namespace acme
