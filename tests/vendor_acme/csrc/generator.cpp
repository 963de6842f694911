#include "generator.h"

#include "ledger.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <mutex>

namespace acme {
namespace {

// A Mersenne twister of its own per generator. It is a CPU generator inside, which the CPU fallback hands to kernels.
class Generator final : public c10::GeneratorImpl {
 public:
  Generator(c10::DeviceIndex device, at::Generator stream)
      : c10::GeneratorImpl(
            c10::Device(c10::DeviceType::PrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        stream_(std::move(stream)) {}

  static c10::DeviceType device_type() {
    return c10::DeviceType::PrivateUse1;
  }
  at::Generator stream() const {
    return stream_;
  }

  void set_current_seed(uint64_t seed) override {
    const std::lock_guard<std::mutex> lock(stream_.mutex());
    stream_.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "acme generators have no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "acme generators have no offset");
  }
  uint64_t current_seed() const override {
    return stream_.current_seed();
  }
  uint64_t seed() override {
    const std::lock_guard<std::mutex> lock(stream_.mutex());
    return stream_.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    const std::lock_guard<std::mutex> lock(stream_.mutex());
    stream_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return stream_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override {
    return new Generator(device().index(), stream_.clone());
  }

  mutable at::Generator stream_;
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* made = new std::array<at::Generator, kMostDevices>();
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  at::Generator& generator = made->at(device);
  if (!generator.defined()) {
    generator = new_generator(device);
    generator.seed();
  }
  return generator;
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator());
}

at::Generator host_stream(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == c10::DeviceType::PrivateUse1,
      "Expected an 'acme' device type for generator but found '", generator.device().type(), "'");
  return generator.get<Generator>()->stream();
}

}  // namespace acme
