#include "study/probe.h"

#include <gmock/gmock.h>

#include <set>
#include <stdexcept>

namespace isomer {
namespace {

TEST(Probe, CollectivesOfEveryKindAreTimedOnBothSidesOfTheSplit) {
  ProbeOptions options;
  options.seconds_per_shape = 1e-4;
  SampleFamilies families;
  sample_collectives(options, families);
  ASSERT_EQ(families.size(), 5u);
  for (const auto& [label, family] : families) {
    EXPECT_EQ(family.samples.size(), 15u) << label;
    double largest = 0;
    std::set<double> bytes;
    for (const TimedOperation& sample : family.samples) {
      EXPECT_GT(sample.seconds, 0);
      EXPECT_LT(sample.seconds, 10);
      EXPECT_EQ(sample.operation.devices, 2);
      EXPECT_GT(cost_of(sample.operation).bytes_written, 0) << label;
      bytes.insert(sample.operation.bytes);

      if (sample.operation.bytes >= 1 << 24) largest = sample.seconds;
    }
    EXPECT_EQ(bytes.size(), 15u) << label;
    // 16 MiB take at least as long as memory needs for them, at a rate that no machine has.
    EXPECT_GT(largest, 8e6 / 1e12) << label;
  }
}

TEST(Probe, ReadBandwidthIsThatOfAMemory) {
  const double bandwidth = read_bandwidth();
  EXPECT_GT(bandwidth, 1e8);
  EXPECT_LT(bandwidth, 1e13);
}

TEST(Probe, OptionsOutOfRangeAreNamed) {
  for (const auto& [options, name] :
       {std::pair{ProbeOptions{.num_ranks = 0}, "--ranks 0"}, std::pair{ProbeOptions{.num_ranks = 65}, "--ranks 65"},
        std::pair{ProbeOptions{.threads_per_rank = 0}, "--threads 0"}}) {
    try {
      probe_machine(options);
      ADD_FAILURE() << name << " was accepted";
    } catch (const std::invalid_argument& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(name));
    }
  }
}

}  // namespace
}  // namespace isomer
