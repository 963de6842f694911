#include "memory.h"

#include "device.h"
#include "faults.h"

#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace acme {
namespace {

constexpr int64_t kAll = kBytesPerDevice * kMostDevices;
constexpr int64_t kAlign = 64;
constexpr int64_t kGiveBack = int64_t{1} << 20;  // blocks from this size return their pages to the system when freed

// One file in memory, mapped twice. Tensors hold addresses of the mapping without any access rights, so a CPU kernel
// that reads or writes a device tensor by accident dies on the spot instead of being silently right. The driver works
// through the other mapping, a constant distance away. Pages exist once they are touched.
struct Mapping {
  char* locked = nullptr;
  char* open = nullptr;

  Mapping() {
    const int file = memfd_create("acme", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kAll) == 0, "acme: no memory for the device: ", std::strerror(errno));
    locked = map(file, PROT_NONE);
    open = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  static char* map(int file, int rights) {
    void* address = mmap(nullptr, kAll, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(address != MAP_FAILED, "acme: no address space for the device: ", std::strerror(errno));
    return static_cast<char*>(address);
  }
};

// Never destroyed: tensors may outlive every other static of the process.
const Mapping& mapping() {
  static const Mapping* made = new Mapping();
  return *made;
}

// First fit over free ranges, which join again when their neighbours are freed.
class Heap {
 public:
  int64_t take(int64_t bytes, c10::DeviceIndex device) {
    const int64_t room = (bytes + kAlign - 1) / kAlign * kAlign;
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t limit = memory_limit(device);
    const int64_t live = read_ledger(device).live_bytes;
    auto found = live + bytes > limit ? free_.end() : free_.begin();
    while (found != free_.end() && found->second < room) {
      ++found;
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, found != free_.end(),
        "acme:", static_cast<int>(device), " is out of memory: ", bytes, " bytes asked for, ", live, " of ", limit, " in use");
    const auto [offset, size] = *found;
    free_.erase(found);
    if (size > room) {
      free_[offset + room] = size - room;
    }
    taken_[offset] = bytes;
    note_allocation(device, bytes);
    return offset;
  }

  void give(int64_t offset, c10::DeviceIndex device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto taken = taken_.find(offset);
    const int64_t bytes = taken->second;
    int64_t room = (bytes + kAlign - 1) / kAlign * kAlign;
    taken_.erase(taken);
    note_release(device, bytes);
    if (bytes >= kGiveBack) {
      give_back_pages(device * kBytesPerDevice + offset, room);
    }
    auto after = free_.lower_bound(offset);
    if (after != free_.end() && after->first == offset + room) {
      room += after->second;
      after = free_.erase(after);
    }
    if (after != free_.begin() && std::prev(after)->first + std::prev(after)->second == offset) {
      std::prev(after)->second += room;
    } else {
      free_[offset] = room;
    }
  }

 private:
  static void give_back_pages(int64_t offset, int64_t size) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t first = (offset + page - 1) / page * page;
    const int64_t last = (offset + size) / page * page;
    if (last > first) {
      // Only a hint: where the system refuses, the pages stay until the process ends.
      (void)madvise(mapping().open + first, last - first, MADV_REMOVE);
    }
  }

  std::mutex mutex_;
  std::map<int64_t, int64_t> free_{{0, kBytesPerDevice}};  // offset -> size
  std::map<int64_t, int64_t> taken_;                       // offset -> bytes asked for
};

std::array<Heap, kMostDevices>& heaps() {
  static auto* made = new std::array<Heap, kMostDevices>();
  return *made;
}

void release(void* address) {
  const c10::DeviceIndex device = owner(address);
  heaps().at(device).give(static_cast<char*>(address) - mapping().locked - device * kBytesPerDevice, device);
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex device = current_device();
    const c10::Device where(c10::DeviceType::PrivateUse1, device);
    open_context(device);
    if (bytes == 0) {
      return {nullptr, where};
    }
    const int64_t offset = heaps().at(device).take(static_cast<int64_t>(bytes), device);
    void* address = mapping().locked + device * kBytesPerDevice + offset;
    return {address, address, &release, where};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(driver_address(target), driver_address(source), count);
  }
};

Allocator the_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &the_allocator);

}  // namespace

c10::Allocator* allocator() {
  return &the_allocator;
}

void* driver_address(const void* device_address) {
  return device_address == nullptr ? nullptr : mapping().open + (static_cast<const char*>(device_address) - mapping().locked);
}

c10::DeviceIndex owner(const void* device_address) {
  const auto* address = static_cast<const char*>(device_address);
  if (address < mapping().locked || address >= mapping().locked + kAll) {
    return -1;
  }
  return static_cast<c10::DeviceIndex>((address - mapping().locked) / kBytesPerDevice);
}

}  // namespace acme
