// Which devices there are, and which of them the calling thread works on.
#pragma once

#include <c10/core/Device.h>

namespace acme {

// ACME_DEVICES at load time, 2 without it. 0 stands for a driver that finds no hardware.
c10::DeviceIndex device_count();

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);

// A device has a context from its first allocation on.
void open_context(c10::DeviceIndex device);
bool has_context(c10::DeviceIndex device);

}  // namespace acme
