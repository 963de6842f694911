// Compiled as one unit with unit_operators.cpp as the other: reading torch's headers takes most of the build's time, and
// this way they are read twice, in parallel, not ten times.
#include "device.cpp"
#include "faults.cpp"
#include "generator.cpp"
#include "ledger.cpp"
#include "memory.cpp"
#include "python.cpp"
