// What the device can be told to get wrong, at any time, from Python. Real devices fail like this; tests need it on cue.
#pragma once

#include "ledger.h"

#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstdint>

namespace acme {

// Bytes that may be alive on one device. Past it an allocation raises torch.OutOfMemoryError.
void set_memory_limit(c10::DeviceIndex device, int64_t bytes);
int64_t memory_limit(c10::DeviceIndex device);

// Let the `ordinal`-th copy from now on raise (1 is the next one), once or from there on; 0 takes it back.
void fail_copy(int64_t ordinal, bool from_there_on);
void fail_if_told(Direction direction, c10::DeviceIndex device);

// A device without 64-bit floats refuses to make such a tensor.
void set_refuses_float64(bool refuses);
bool refuses_float64();
void check_dtype(c10::ScalarType dtype);

// Foreign: a CPU parameter cannot become an acme parameter by `param.data = new`. Set-data: it can. Tensors keep the
// kind they were made with.
void set_shares_impl(bool shares);
bool shares_impl();

}  // namespace acme
