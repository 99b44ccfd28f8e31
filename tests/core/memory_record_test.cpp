// The memory record against a naive model that keeps everything and looks it up.
#include "core/memory_record.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <map>

#include "core/error.h"

namespace isomer {
namespace {

/// Everything standing, copied at every moment of the window.
class NaiveRecord {
 public:
  using Standing = std::map<std::int64_t, StandingTensor>;

  void allocate(std::int64_t id, StandingTensor tensor) {
    now_[id] = std::move(tensor);
    if (open_) moments_.push_back(now_);
  }
  void free(std::int64_t id) {
    now_.erase(id);
    if (open_) moments_.push_back(now_);
  }
  void open() {
    moments_ = {now_};
    open_ = true;
  }
  void close() { open_ = false; }

  static std::int64_t activation_bytes(const Standing& standing) {
    std::int64_t sum = 0;
    for (const auto& [id, tensor] : standing) {
      const auto c = tensor.memory_class;
      if (c == MemoryClass::saved || c == MemoryClass::workspace || c == MemoryClass::communication)
        sum += tensor.bytes;
    }
    return sum;
  }
  const Standing& now() const { return now_; }
  /// The first moment with the most activation bytes.
  const Standing& peak() const {
    const Standing* best = &moments_.front();
    for (const Standing& moment : moments_) {
      if (activation_bytes(moment) > activation_bytes(*best)) best = &moment;
    }
    return *best;
  }

 private:
  Standing now_;
  std::vector<Standing> moments_{Standing{}};
  bool open_ = true;
};

using Sums = std::map<std::pair<std::string, MemoryClass>, std::int64_t>;

Sums sums_of_activations(const NaiveRecord::Standing& standing) {
  Sums sums;
  for (const auto& [id, t] : standing) {
    if (NaiveRecord::activation_bytes({{id, t}}) > 0 || is_activation(t.memory_class)) {
      sums[{t.name, t.memory_class}] += t.bytes;
    }
  }
  return sums;
}

void check_against(const MemoryRecord& record, const NaiveRecord& naive) {
  RC_ASSERT(record.current_activation_bytes() == NaiveRecord::activation_bytes(naive.now()));
  RC_ASSERT(record.peak_activation_bytes() == NaiveRecord::activation_bytes(naive.peak()));
  Sums sums;
  std::int64_t before = std::numeric_limits<std::int64_t>::max();
  for (const StandingTensor& t : record.standing_at_peak()) {
    sums[{t.name, t.memory_class}] = t.bytes;
    RC_ASSERT(t.bytes <= before);
    before = t.bytes;
  }
  RC_ASSERT(sums == sums_of_activations(naive.peak()));
  const auto standing = record.standing();
  RC_ASSERT(standing.size() == naive.now().size());
  std::size_t i = 0;
  for (const auto& [id, t] : naive.now()) {  // ids rise in order of allocation
    RC_ASSERT(standing[i].name == t.name);
    RC_ASSERT(standing[i].bytes == t.bytes);
    ++i;
  }
}

void random_history() {
  MemoryRecord record;
  NaiveRecord naive;
  const auto length = *rc::gen::inRange(0, 80);
  for (int step = 0; step < length; ++step) {
    const int what = *rc::gen::inRange(0, 20);
    if (what < 10 || (what < 18 && naive.now().empty())) {
      const auto memory_class = static_cast<MemoryClass>(*rc::gen::inRange(0, kNumMemoryClasses));
      const StandingTensor tensor{std::string(1, *rc::gen::inRange('a', 'e')), memory_class, *rc::gen::inRange(0, 9)};
      naive.allocate(record.allocated(tensor.name, tensor.memory_class, tensor.bytes), tensor);
    } else if (what < 18) {
      auto at = naive.now().begin();
      std::advance(at, *rc::gen::inRange<std::size_t>(0, naive.now().size()));
      const std::int64_t id = at->first;
      record.freed(id);
      naive.free(id);
    } else if (what == 18) {
      record.open_window();
      naive.open();
    } else {
      record.close_window();
      naive.close();
    }
    check_against(record, naive);
  }
}

TEST(MemoryRecord, AgreesWithANaiveOneOverRandomHistories) {
  EXPECT_TRUE(rc::check("random allocations, frees and windows", random_history));
}

TEST(MemoryRecord, TheWindowCountsWhatStoodWhenItOpened) {
  MemoryRecord record;
  const auto x = record.allocated("x", MemoryClass::saved, 100);
  record.freed(record.allocated("early", MemoryClass::workspace, 1000));
  EXPECT_EQ(record.peak_activation_bytes(), 1100);
  record.open_window();
  EXPECT_EQ(record.peak_activation_bytes(), 100);
  const auto y = record.allocated("y", MemoryClass::communication, 10);
  record.close_window();
  record.allocated("report", MemoryClass::workspace, 5000);
  record.freed(x);
  record.freed(y);
  EXPECT_EQ(record.peak_activation_bytes(), 110);
  const auto standing = record.standing_at_peak();
  ASSERT_EQ(standing.size(), 2u);
  EXPECT_EQ(standing[0].name, "x");
  EXPECT_EQ(standing[1].name, "y");
  EXPECT_EQ(record.current_activation_bytes(), 5000);
}

TEST(MemoryRecord, WeightsGradientsStatesAndCachesAreNoActivations) {
  MemoryRecord record;
  for (const auto c : {MemoryClass::weight, MemoryClass::gradient, MemoryClass::optimiser, MemoryClass::cache}) {
    record.allocated("t", c, 100);
    EXPECT_EQ(record.current_bytes(c), 100);
  }
  EXPECT_EQ(record.peak_activation_bytes(), 0);
  EXPECT_TRUE(record.standing_at_peak().empty());
  EXPECT_EQ(record.standing().size(), 4u);
}

TEST(MemoryRecord, ASecondFreeIsABug) {
  MemoryRecord record;
  const auto id = record.allocated("t", MemoryClass::saved, 1);
  record.freed(id);
  EXPECT_THROW(record.freed(id), CheckFailure);
}

}  // namespace
}  // namespace isomer
