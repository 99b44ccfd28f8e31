// What processes show of themselves, as the launcher and the other ranks of the machine read it.
#include "comm/call_board.h"

#include <gmock/gmock.h>

namespace isomer {
namespace {

using ::testing::HasSubstr;

TEST(CallBoard, ShowsToOthersWhatARankDoes) {
  const auto board = CallBoard::create(3);
  const auto ranks = CallBoard::open(board->path());
  ASSERT_NE(ranks, nullptr);
  EXPECT_GE(ranks->num_ranks(), 3);
  CallSlot& mine = ranks->slot(1);
  EXPECT_EQ(board->doing(1), "");
  mine.state.store(RankState::running);
  EXPECT_EQ(board->lost(), "error: rank 1 died before its first call\n");
  mine.begin_call("all_gather 'k' (forward)");
  EXPECT_EQ(board->doing(1), " (it waits in all_gather 'k' (forward))");
  EXPECT_EQ(board->lost(), "error: rank 1 died in all_gather 'k' (forward)\n");
  mine.end_call();
  EXPECT_EQ(board->doing(1), " (its last call was all_gather 'k' (forward))");
  EXPECT_EQ(board->lost(), "error: rank 1 died after all_gather 'k' (forward)\n");
  mine.begin_call(std::string(1000, 'x'));
  EXPECT_EQ(std::string(mine.call()), std::string(CallSlot::kMaxText - 1, 'x'));
}

TEST(CallBoard, KnowsTheLostFromThoseThatEndedWithAWord) {
  const auto board = CallBoard::create(4);
  const RankState states[] = {RankState::ended, RankState::failed, RankState::ended_by_launcher, RankState::absent};
  for (int rank = 0; rank < 4; ++rank) board->slot(rank).state.store(states[rank]);
  EXPECT_EQ(board->lost(), "");
  // What a thread of the rank does meanwhile brings it back neither to life nor to death.
  for (int rank = 0; rank < 4; ++rank) {
    board->slot(rank).begin_call("barrier (setup)");
    board->slot(rank).end_call();
  }
  EXPECT_EQ(board->lost(), "");
}

TEST(CallBoard, ARankThatFailedSpeaksForThoseItTookAlong) {
  const auto board = CallBoard::create(2);
  board->slot(1).state.store(RankState::running);
  EXPECT_EQ(board->lost(), "error: rank 1 died before its first call\n");
  board->slot(0).state.store(RankState::failed);
  EXPECT_EQ(board->lost(), "");
}

TEST(CallBoard, OpensNothingElse) {
  EXPECT_EQ(CallBoard::open("/proc/self/exe"), nullptr);
  EXPECT_EQ(CallBoard::open("/nowhere"), nullptr);
  EXPECT_EQ(CallBoard::open(""), nullptr);
}

TEST(ProcessWatch, NamesAProcessThatStandsStill) {
  const auto board = CallBoard::create(2);
  ProcessWatch watch(*board, 2);
  for (const int rank : {0, 1}) board->slot(rank).state.store(RankState::running);
  board->slot(1).begin_call("all_reduce 'y' (forward)");
  double now_s = 100;
  for (int i = 0; i < 100; ++i, now_s += 0.1) {
    for (const int rank : {0, 1}) board->slot(rank).ticks.fetch_add(1);
    ASSERT_EQ(watch.verdict(now_s), "");
  }
  // The launcher itself was stopped for a minute.
  now_s += 60;
  EXPECT_EQ(watch.verdict(now_s), "");
  for (int i = 0; i < 10; ++i, now_s += 0.1) {
    board->slot(0).ticks.fetch_add(1);
    EXPECT_EQ(watch.verdict(now_s), "");
  }
  std::string verdict;
  for (int i = 0; i < 20 && verdict.empty(); ++i, now_s += 0.1) {
    board->slot(0).ticks.fetch_add(1);
    verdict = watch.verdict(now_s);
  }
  EXPECT_THAT(verdict, HasSubstr("error: rank 1: its process has stood still for 2"));
  EXPECT_THAT(verdict, HasSubstr("(it waits in all_reduce 'y' (forward))"));
}

}  // namespace
}  // namespace isomer
