#include "core/memory_record.h"

#include <algorithm>
#include <map>

#include "core/error.h"

namespace isomer {

std::string_view name_of(MemoryClass memory_class) {
  constexpr std::string_view kNames[kNumMemoryClasses] = {"weight",    "gradient",      "optimiser", "saved",
                                                          "workspace", "communication", "cache"};
  return kNames[static_cast<int>(memory_class)];
}

std::int64_t MemoryRecord::allocated(std::string_view name, MemoryClass memory_class, std::int64_t bytes) {
  auto id = static_cast<std::int64_t>(allocations_.size());
  if (reusable_.empty()) {
    allocations_.push_back({{std::string(name), memory_class, bytes}, true});
  } else {
    id = reusable_.back();
    reusable_.pop_back();
    allocations_[static_cast<std::size_t>(id)] = {{std::string(name), memory_class, bytes}, true};
  }
  current_[static_cast<int>(memory_class)] += bytes;
  if (window_open_) {
    events_.push_back({id, true});
    if (const auto total = current_activation_bytes(); total > peak_bytes_) {
      peak_bytes_ = total;
      peak_event_ = events_.size();
    }
  }
  return id;
}

void MemoryRecord::freed(std::int64_t id) {
  auto& allocation = allocations_.at(static_cast<std::size_t>(id));
  ISOMER_CHECK(allocation.alive, "'{}' freed twice", allocation.tensor.name);
  allocation.alive = false;
  current_[static_cast<int>(allocation.tensor.memory_class)] -= allocation.tensor.bytes;
  if (window_open_) events_.push_back({id, false});
}

void MemoryRecord::reclassify(std::int64_t id, MemoryClass memory_class) {
  auto& tensor = allocations_.at(static_cast<std::size_t>(id)).tensor;
  ISOMER_CHECK(is_activation(tensor.memory_class) == is_activation(memory_class), "'{}' from {} to {}", tensor.name,
               name_of(tensor.memory_class), name_of(memory_class));
  current_[static_cast<int>(tensor.memory_class)] -= tensor.bytes;
  tensor.memory_class = memory_class;
  current_[static_cast<int>(memory_class)] += tensor.bytes;
}

void MemoryRecord::open_window() {
  events_.clear();
  alive_at_open_.clear();
  reusable_.clear();
  for (std::size_t id = allocations_.size(); id-- > 0;) {
    (allocations_[id].alive ? alive_at_open_ : reusable_).push_back(static_cast<std::int64_t>(id));
  }
  peak_bytes_ = current_activation_bytes();
  peak_event_ = 0;
  window_open_ = true;
}

void MemoryRecord::close_window() { window_open_ = false; }

std::int64_t MemoryRecord::current_bytes(MemoryClass memory_class) const {
  return current_[static_cast<int>(memory_class)];
}

std::int64_t MemoryRecord::current_activation_bytes() const {
  return current_bytes(MemoryClass::saved) + current_bytes(MemoryClass::workspace) +
         current_bytes(MemoryClass::communication);
}

std::vector<StandingTensor> MemoryRecord::standing_at_peak() const {
  std::vector<bool> alive(allocations_.size(), false);
  for (auto id : alive_at_open_) alive[static_cast<std::size_t>(id)] = true;
  for (std::size_t e = 0; e < peak_event_; ++e)
    alive[static_cast<std::size_t>(events_[e].id)] = events_[e].is_allocation;
  std::map<std::pair<std::string, MemoryClass>, std::int64_t> sums;
  for (std::size_t id = 0; id < alive.size(); ++id) {
    const auto& tensor = allocations_[id].tensor;
    if (alive[id] && is_activation(tensor.memory_class)) sums[{tensor.name, tensor.memory_class}] += tensor.bytes;
  }
  std::vector<StandingTensor> result;
  for (const auto& [key, bytes] : sums) result.push_back({key.first, key.second, bytes});
  std::stable_sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  return result;
}

std::vector<StandingTensor> MemoryRecord::standing() const {
  std::vector<StandingTensor> result;
  for (const auto& allocation : allocations_) {
    if (allocation.alive) result.push_back(allocation.tensor);
  }
  return result;
}

}  // namespace isomer
