#include "train/batches.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <numeric>
#include <set>

#include "train/permutation.h"

namespace isomer {
namespace {

/// Documents of the given lengths over ids 0, 1, 2 …, so that an id says where it stood.
TokenDataset counting(const std::vector<std::int64_t>& lengths) {
  std::vector<std::vector<std::int32_t>> documents;
  std::int32_t next = 0;
  for (const std::int64_t length : lengths) {
    documents.emplace_back(static_cast<std::size_t>(length));
    std::iota(documents.back().begin(), documents.back().end(), next);
    next += static_cast<std::int32_t>(length);
  }
  return TokenDataset::from_tokens(documents, 1 << 20);
}

using Ints = std::vector<std::int32_t>;

TEST(Permutation, IsOneForEverySizeAndSeed) {
  for (const std::int64_t count : {1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 1000}) {
    for (const std::uint64_t seed : {0, 1, 77}) {
      std::set<std::int64_t> seen;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t place = permuted(i, count, seed, 3);
        EXPECT_TRUE(place >= 0 && place < count);
        seen.insert(place);
      }
      EXPECT_EQ(static_cast<std::int64_t>(seen.size()), count);
    }
  }
  EXPECT_THROW(permuted(0, 0, 0, 0), std::invalid_argument);
  EXPECT_THROW(permuted(5, 5, 0, 0), std::invalid_argument);
  EXPECT_THROW(permuted(-1, 5, 0, 0), std::invalid_argument);
}

TEST(Permutation, IsTheSameOnEveryMachine) {
  // Computed by a second implementation in Python: a run that resumes elsewhere must go on with the same order.
  Ints order;
  for (std::int64_t i = 0; i < 10; ++i) order.push_back(static_cast<std::int32_t>(permuted(i, 10, 1, 0)));
  EXPECT_EQ(order, (Ints{9, 0, 2, 7, 6, 5, 8, 4, 1, 3}));
}

TEST(Permutation, SpreadsAndChangesWithSeedAndRound) {
  // Of random permutations of 1000, the mean distance between neighbours' places is 333 ± 8 (one standard deviation).
  const auto distance = [](std::uint64_t seed, std::uint64_t round) {
    double sum = 0;
    for (std::int64_t i = 0; i < 999; ++i) {
      sum += std::abs(static_cast<double>(permuted(i, 1000, seed, round) - permuted(i + 1, 1000, seed, round)));
    }
    return sum / 999;
  };
  for (std::uint64_t seed = 0; seed < 5; ++seed) EXPECT_NEAR(distance(seed, seed + 1), 333, 40);
  int same_seed = 0, same_round = 0;
  for (std::int64_t i = 0; i < 1000; ++i) {
    same_seed += permuted(i, 1000, 5, 0) == permuted(i, 1000, 5, 1);
    same_round += permuted(i, 1000, 5, 0) == permuted(i, 1000, 6, 0);
  }
  EXPECT_LT(same_seed, 10);  // one is expected
  EXPECT_LT(same_round, 10);
}

TEST(Batches, SequencesOfPackedDocuments) {
  const BatchOrder order(counting({3, 6, 1, 4}), {.seq_len = 5, .shuffle = false});
  ASSERT_EQ(order.num_sequences(), 2);
  const Sample first = order.sample(0);
  EXPECT_EQ(first.ids, (Ints{0, 1, 2, 3, 4}));
  EXPECT_EQ(first.targets, (Ints{1, 2, -1, 4, 5}));
  EXPECT_EQ(first.segments, (Ints{0, 0, 0, 1, 1}));
  EXPECT_EQ(first.positions, (Ints{0, 1, 2, 3, 4}));
  const Sample second = order.sample(1);
  EXPECT_EQ(second.ids, (Ints{5, 6, 7, 8, 9}));
  EXPECT_EQ(second.targets, (Ints{6, 7, 8, -1, -1}));
  EXPECT_EQ(second.segments, (Ints{0, 0, 0, 0, 1}));
  EXPECT_EQ(order.sample(2).ids, first.ids);  // the next epoch
}

TEST(Batches, TailAndRestartedPositions) {
  const BatchOrder order(counting({3, 6, 1, 4}),
                         {.seq_len = 5, .shuffle = false, .restart_positions = true, .keep_tail = true});
  ASSERT_EQ(order.num_sequences(), 3);
  EXPECT_EQ(order.sample(0).positions, (Ints{0, 1, 2, 0, 1}));
  const Sample tail = order.sample(2);
  EXPECT_EQ(tail.ids, (Ints{10, 11, 12, 0, 0}));
  EXPECT_EQ(tail.targets, (Ints{11, 12, 13, -1, -1}));
  EXPECT_EQ(tail.segments, (Ints{0, 0, 0, 1, 1}));
  EXPECT_EQ(tail.positions, (Ints{0, 1, 2, 0, 1}));
}

TEST(Batches, RefusesWhatHasNoSequence) {
  EXPECT_THROW(BatchOrder(counting({5}), {.seq_len = 5}), std::invalid_argument);
  EXPECT_EQ(BatchOrder(counting({6}), {.seq_len = 5}).num_sequences(), 1);
  EXPECT_EQ(BatchOrder(counting({2}), {.seq_len = 5, .keep_tail = true}).num_sequences(), 1);
  EXPECT_THROW(BatchOrder(counting({1}), {.seq_len = 5, .keep_tail = true}), std::invalid_argument);
  EXPECT_THROW(BatchOrder(counting({6}), {.seq_len = 0}), std::invalid_argument);
  EXPECT_THROW(BatchOrder(counting({6}), {.seq_len = 5}).sample(-1), std::invalid_argument);
}

TEST(Batches, EveryTokenIsATargetOnceAnEpoch) {
  EXPECT_TRUE(rc::check([] {
    const auto lengths = *rc::gen::nonEmpty(rc::gen::container<std::vector<std::int64_t>>(rc::gen::inRange(1, 12)));
    const std::int64_t num_tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    const std::int64_t seq_len = *rc::gen::inRange(1, 9);
    RC_PRE(num_tokens >= 2);
    const TokenDataset dataset = counting(lengths);
    const BatchOrder order(dataset,
                           {.seq_len = seq_len, .seed = *rc::gen::arbitrary<std::uint64_t>(), .keep_tail = true});
    std::multiset<std::int32_t> targets;
    for (std::int64_t i = 0; i < order.num_sequences(); ++i) {
      const Sample sample = order.sample(i + order.num_sequences());
      for (std::size_t at = 0; at < sample.ids.size(); ++at) {
        if (sample.targets[at] < 0) continue;
        targets.insert(sample.targets[at]);
        RC_ASSERT(sample.targets[at] == sample.ids[at] + 1);
        if (at + 1 < sample.ids.size() && sample.ids[at + 1] == sample.targets[at])
          RC_ASSERT(sample.segments[at] == sample.segments[at + 1]);
      }
    }
    // All but the first token of each document.
    std::multiset<std::int32_t> expected;
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      if (dataset.document_begin(dataset.document_of(token)) != token)
        expected.insert(static_cast<std::int32_t>(token));
    }
    RC_ASSERT(targets == expected);
  }));
}

TEST(Batches, SamplesAreAFunctionOfSeedAndIndex) {
  const TokenDataset dataset = counting({100, 37, 250});
  const BatchOrder one(dataset, {.seq_len = 7, .seed = 3}), other(dataset, {.seq_len = 7, .seed = 3});
  const BatchOrder reseeded(dataset, {.seq_len = 7, .seed = 4});
  int differs = 0, moves = 0;
  for (std::int64_t index = 2 * one.num_sequences() - 1; index >= 0; --index) {
    EXPECT_EQ(one.sample(index).ids, other.sample(index).ids);
    differs += one.sequence_of(index) != reseeded.sequence_of(index);
    moves += one.sequence_of(index) != one.sequence_of(index + one.num_sequences());
  }
  EXPECT_GT(differs, one.num_sequences());
  EXPECT_GT(moves, one.num_sequences());
}

}  // namespace
}  // namespace isomer
