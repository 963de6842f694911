// The other unit, see unit_device.cpp.
#include "autocast.cpp"
#include "copy.cpp"
#include "fallback.cpp"
#include "ops.cpp"
#include "rnn.cpp"
