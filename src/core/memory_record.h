// Tracked memory: every tensor of a rank is entered here under a name and a class, so that the peak, and what
// stands in it, is exact.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace isomer {

enum class MemoryClass : std::uint8_t { weight, gradient, optimiser, saved, workspace, communication, cache };
inline constexpr int kNumMemoryClasses = 7;
std::string_view name_of(MemoryClass memory_class);

/// Saved activations, workspace and communication buffers: what contract 8 calls the activation peak.
constexpr bool is_activation(MemoryClass c) {
  return c == MemoryClass::saved || c == MemoryClass::workspace || c == MemoryClass::communication;
}

/// What stands in memory at one moment.
struct StandingTensor {
  std::string name;
  MemoryClass memory_class;
  std::int64_t bytes;
};

/// One rank's allocations, in program order. Only the rank's own thread allocates while a window is open; all bytes
/// are logical (elements × element size), without allocator rounding.
class MemoryRecord {
 public:
  /// Enters an allocation and returns its id, to be given to `freed`.
  std::int64_t allocated(std::string_view name, MemoryClass memory_class, std::int64_t bytes);
  void freed(std::int64_t id);
  /// What was allocated for one purpose now serves another (workspace that is kept, say). Moves no bytes.
  void reclassify(std::int64_t id, MemoryClass memory_class);

  /// Forgets the events so far; the peak is that of what happens from here on, what stands now included.
  void open_window();
  /// What happens from here on (reporting, say) no longer counts towards the peak.
  void close_window();

  std::int64_t current_bytes(MemoryClass memory_class) const;
  std::int64_t current_activation_bytes() const;
  /// Largest sum of activation bytes inside the window.
  std::int64_t peak_activation_bytes() const { return peak_bytes_; }
  /// What stood at the (first) moment of the peak, largest first, tensors of one name and class added up.
  std::vector<StandingTensor> standing_at_peak() const;
  /// What stands now, in order of allocation.
  std::vector<StandingTensor> standing() const;

  /// Scratch that libraries and pool threads hold outside the peak; a figure of its own in the reports.
  void add_untracked(std::int64_t bytes) { untracked_bytes_ += bytes; }
  std::int64_t untracked_bytes() const { return untracked_bytes_; }

  /// Tests: fill what is allocated with NaN, so that memory nobody owns poisons results that touch it.
  bool poison = false;

 private:
  struct Event {
    std::int64_t id;  // index into allocations_
    bool is_allocation;
  };
  struct Allocation {
    StandingTensor tensor;
    bool alive;
  };
  std::vector<Allocation> allocations_;
  std::vector<std::int64_t> reusable_;       // entries that were dead when the window opened
  std::vector<Event> events_;                // inside the window
  std::vector<std::int64_t> alive_at_open_;  // ids that stood when the window opened
  std::int64_t current_[kNumMemoryClasses] = {};
  std::int64_t peak_bytes_ = 0;
  std::size_t peak_event_ = 0;  // number of events up to the peak
  std::int64_t untracked_bytes_ = 0;
  bool window_open_ = true;
};

}  // namespace isomer
