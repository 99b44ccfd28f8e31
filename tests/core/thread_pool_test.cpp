#include "core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "core/record.h"

namespace isomer {
namespace {

class Pool : public ::testing::TestWithParam<int> {};

TEST_P(Pool, DoesEveryTaskOnceOnAThreadOfItsOwn) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.num_threads(), GetParam());
  for (const std::int64_t num_tasks : {0, 1, 2, 3, 7, 1000}) {
    std::vector<std::atomic<int>> done(static_cast<std::size_t>(num_tasks));
    std::atomic<bool> thread_in_range = true;
    pool.parallel_for(num_tasks, [&](std::int64_t task, int thread) {
      ++done[static_cast<std::size_t>(task)];
      if (thread < 0 || thread >= GetParam()) thread_in_range = false;
    });
    for (const auto& count : done) ASSERT_EQ(count, 1);
    EXPECT_TRUE(thread_in_range);
  }
}

TEST_P(Pool, NoTwoTasksShareAThreadAtATime) {
  ThreadPool pool(GetParam());
  std::vector<std::atomic<int>> busy(static_cast<std::size_t>(GetParam()));
  std::atomic<int> clashes = 0;
  pool.parallel_for(2000, [&](std::int64_t, int thread) {
    auto& flag = busy[static_cast<std::size_t>(thread)];
    if (++flag != 1) ++clashes;
    --flag;
  });
  EXPECT_EQ(clashes, 0);
}

TEST_P(Pool, RethrowsAndStaysUsable) {
  ThreadPool pool(GetParam());
  for (int repetition = 0; repetition < 50; ++repetition) {
    std::atomic<int> begun = 0;
    try {
      pool.parallel_for(100, [&](std::int64_t task, int) {
        ++begun;
        if (task >= 5) throw std::runtime_error("task failed");
      });
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "task failed");
    }
    EXPECT_LE(begun, 5 + 2 * GetParam()) << "tasks went on after the failure";
    std::atomic<int> sum = 0;
    pool.parallel_for(10, [&](std::int64_t task, int) { sum += static_cast<int>(task); });
    EXPECT_EQ(sum, 45);
  }
}

TEST_P(Pool, ATaskAloneThrowsToo) {
  ThreadPool pool(GetParam());
  EXPECT_THROW(pool.parallel_for(1, [](std::int64_t, int) { throw std::invalid_argument("no"); }),
               std::invalid_argument);
  EXPECT_NO_THROW(pool.parallel_for(0, [](std::int64_t, int) { throw std::invalid_argument("no"); }));
}

TEST_P(Pool, TasksAreSeenByTheCallerWhenItReturns) {
  ThreadPool pool(GetParam());
  std::vector<std::int64_t> squares(513);
  for (int repetition = 0; repetition < 200; ++repetition) {
    pool.parallel_for(
        513, [&](std::int64_t task, int) { squares[static_cast<std::size_t>(task)] = task * task + repetition; });
    for (std::int64_t i = 0; i < 513; ++i) ASSERT_EQ(squares[static_cast<std::size_t>(i)], i * i + repetition);
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, Pool, ::testing::Values(1, 2, 3, 8));

TEST(ThreadPool, CountsTheWorkersProcessorTime) {
  ThreadPool pool(2);
  pool.parallel_for(2, [](std::int64_t, int) {
    const double begin_s = thread_cpu_s();
    while (thread_cpu_s() - begin_s < 0.02) {}
  });
  EXPECT_GT(pool.last_worker_cpu_s(), 0.01);
  EXPECT_LT(pool.last_worker_cpu_s(), 0.2);
  pool.parallel_for(1, [](std::int64_t, int) {});
  EXPECT_EQ(pool.last_worker_cpu_s(), 0);
}

TEST(ThreadPool, NeedsAThread) {
  EXPECT_THROW(ThreadPool(0), std::invalid_argument);
  EXPECT_THROW(ThreadPool(-1), std::invalid_argument);
}

}  // namespace
}  // namespace isomer
