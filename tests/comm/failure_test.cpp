// Whatever a rank does wrong, every rank ends, with an error that names rank and call.
#include <gmock/gmock.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "comm/suite.h"

namespace isomer {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

GroupOptions group_of(int num_ranks, double timeout_s = 2) {
  return {.num_ranks = num_ranks, .threads_per_rank = 1, .timeout_s = timeout_s};
}

void sleep_s(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

void gather(RankContext& ctx, Communicator& comm, std::string_view name, std::int64_t count = 4,
            DType dtype = DType::f32) {
  Tensor mine = ctx.zeros(name, MemoryClass::workspace, dtype, {count});
  std::vector<Tensor> receive;
  for (int peer = 0; peer < comm.size(); ++peer) receive.push_back(make(ctx, name, dtype, {count}));
  comm.all_gather(name, mine, receive);
}

void gather(RankContext& ctx, std::string_view name, std::int64_t count = 4, DType dtype = DType::f32) {
  gather(ctx, ctx.comm(), name, count, dtype);
}

/// Runs the body and collects what each rank threw.
std::vector<std::string> errors_by_rank(const GroupOptions& options, const std::function<void(RankContext&)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(options.num_ranks));
  EXPECT_NE(error_of(options,
                     [&](RankContext& ctx) {
                       try {
                         body(ctx);
                       } catch (const std::exception& error) {
                         errors[static_cast<std::size_t>(ctx.rank())] = error.what();
                         throw;
                       }
                     }),
            "");
  return errors;
}

TEST(Failure, ARankThatThrowsEndsAll) {
  const auto body = [](RankContext& ctx) {
    gather(ctx, "k");
    if (ctx.rank() == 1) throw std::runtime_error("boom");
    PhaseScope phase(ctx, Phase::forward);
    gather(ctx, "latent");
  };
  EXPECT_EQ(error_of(group_of(4), body), "rank 1: boom");
  const auto errors = errors_by_rank(group_of(4), body);
  for (int rank : {0, 2, 3})
    EXPECT_EQ(errors[static_cast<std::size_t>(rank)],
              fmt::format("rank {}: all_gather 'latent' (forward): rank 1 threw: boom", rank));
}

TEST(Failure, AUsersMistakeKeepsItsType) {
  EXPECT_THROW(run_group(group_of(3),
                         [](RankContext& ctx) {
                           if (ctx.rank() == 2) invalid_argument("heads = 5: not divisible");
                           ctx.comm().barrier();
                         }),
               std::invalid_argument);
  EXPECT_THROW(run_group(group_of(0), [](RankContext&) {}), std::invalid_argument);
}

TEST(Failure, ARankThatLeavesEarlyEndsAll) {
  EXPECT_THAT(error_of(group_of(3),
                       [](RankContext& ctx) {
                         if (ctx.rank() != 0) gather(ctx, "q");
                       }),
              AllOf(StartsWith("rank "), HasSubstr(": all_gather 'q' (setup): rank 0 left")));
}

TEST(Failure, AnotherCollectiveIsNamed) {
  const auto error = error_of(group_of(2), [](RankContext& ctx) {
    if (ctx.rank() == 0) {
      gather(ctx, "latent");
    } else {
      sleep_s(0.05);
      ctx.comm().barrier();
    }
  });
  EXPECT_EQ(error, "rank 1: barrier (setup): rank 0 issued all_gather 'latent' (setup) of f32 instead");
}

TEST(Failure, AnotherTensorOrTypeIsNamed) {
  EXPECT_THAT(error_of(group_of(3), [](RankContext& ctx) { gather(ctx, ctx.rank() == 1 ? "k" : "v"); }),
              AllOf(HasSubstr("all_gather 'k'"), HasSubstr("all_gather 'v'"), HasSubstr("instead")));
  EXPECT_THAT(
      error_of(group_of(2), [](RankContext& ctx) { gather(ctx, "k", 4, ctx.rank() == 1 ? DType::f64 : DType::f32); }),
      AllOf(HasSubstr("of f"), HasSubstr("instead")));
}

TEST(Failure, AnotherSizeIsNamed) {
  EXPECT_THAT(error_of(group_of(3), [](RankContext& ctx) { gather(ctx, "k", ctx.rank() == 2 ? 5 : 4); }),
              AllOf(HasSubstr("all_gather 'k'"), HasSubstr("bytes"), HasSubstr("expected")));
  EXPECT_THAT(error_of(group_of(2),
                       [](RankContext& ctx) {
                         Tensor x = ctx.zeros("x", MemoryClass::workspace, DType::f32, {4 + ctx.rank()});
                         if (ctx.rank() == 0) ctx.comm().issue_send("x", x, 1).wait();
                         if (ctx.rank() == 1) ctx.comm().issue_receive("x", x, 0).wait();
                       }),
              HasSubstr("rank 1: send_receive 'x' (setup): rank 0 sends 16 bytes, 20 expected"));
}

TEST(Failure, AStalledRankIsNamed) {
  const auto errors = errors_by_rank(group_of(3, 0.5), [](RankContext& ctx) {
    if (ctx.rank() == 1) sleep_s(1.5);
    gather(ctx, "q");
  });
  for (int rank : {0, 2})
    EXPECT_EQ(errors[static_cast<std::size_t>(rank)],
              fmt::format("rank {}: all_gather 'q' (setup): rank 1 showed no sign of life for 0.5 s", rank));
}

TEST(Failure, ASlowRankThatWorksIsNotStalled) {
  run_group(group_of(3, 0.8), [](RankContext& ctx) {
    Tensor x = ctx.zeros("x", MemoryClass::workspace, DType::f32, {4});
    // Rank 2 waits for rank 1, which only waits for rank 0, which works.
    for (int step = 0; ctx.rank() == 0 && step < 40; ++step) {
      sleep_s(0.04);
      ctx.heartbeat().fetch_add(1);
    }
    if (ctx.rank() > 0) ctx.comm().issue_receive("x", x, ctx.rank() - 1).wait();
    if (ctx.rank() < 2) ctx.comm().issue_send("x", x, ctx.rank() + 1).wait();
  });
}

TEST(Failure, ADeadlockEnds) {
  EXPECT_THAT(error_of(group_of(2, 0.5),
                       [](RankContext& ctx) {
                         Tensor x = ctx.zeros("x", MemoryClass::workspace, DType::f32, {4});
                         ctx.comm().issue_receive("x", x, 1 - ctx.rank()).wait();
                       }),
              AllOf(HasSubstr("send_receive 'x'"), HasSubstr("no sign of life for 0.5 s (it waits in send_receive")));
  EXPECT_THAT(error_of(group_of(2, 0.5),
                       [](RankContext& ctx) {
                         Tensor x = ctx.zeros("x", MemoryClass::workspace, DType::f32, {4});
                         if (ctx.rank() == 0) ctx.comm().issue_send("x", x, 1).wait();
                         ctx.comm().barrier();
                       }),
              HasSubstr("no sign of life for 0.5 s (it waits in "));
}

TEST(Failure, AnExceptionPassesWorkUnderWay) {
  const auto begin_s = wall_clock_s();
  EXPECT_EQ(error_of(group_of(2, 30),
                     [](RankContext& ctx) {
                       Tensor x = ctx.zeros("x", MemoryClass::workspace, DType::f32, {4});
                       if (ctx.rank() == 0) {
                         Work work = ctx.comm().issue_send("x", x, 1);
                         throw std::runtime_error("boom");
                       }
                       gather(ctx, "k");
                     }),
            "rank 0: boom");
  EXPECT_LT(wall_clock_s() - begin_s, 20);
}

TEST(Failure, WorkThatIsNotWaitedForIsFinishedByItsDestructor) {
  run_group(group_of(2), [](RankContext& ctx) {
    Tensor x = ctx.zeros("x", MemoryClass::workspace, DType::f32, {4});
    Work work;
    if (ctx.rank() == 0) {
      work = ctx.comm().issue_send("x", x, 1);
    } else {
      work = ctx.comm().issue_receive("x", x, 0);
    }
  });
}

TEST(Failure, ASubgroupsPeerIsNamedByItsWorldRank) {
  EXPECT_THAT(error_of(group_of(4),
                       [](RankContext& ctx) {
                         auto half = ctx.comm().split(ctx.rank() / 2, 0);
                         if (ctx.rank() == 3) return;
                         gather(ctx, *half, "q");
                       }),
              AllOf(HasSubstr("rank 2: all_gather 'q'"), HasSubstr("rank 3 left")));
}

TEST(Failure, DryRanksFailTheSameWay) {
  GroupOptions options = group_of(3);
  options.dry_run = true;
  std::vector<int> ran;
  EXPECT_EQ(error_of(options,
                     [&](RankContext& ctx) {
                       ran.push_back(ctx.rank());
                       if (ctx.rank() == 1) throw std::runtime_error("boom");
                     }),
            "rank 1: boom");
  EXPECT_EQ(ran, (std::vector<int>{0, 1}));
  EXPECT_THAT(error_of(options,
                       [&](RankContext& ctx) {
                         if (ctx.rank() != 1) ctx.comm().split(0, 0);
                       }),
              HasSubstr("split (setup): rank 1 left"));
}

void expect_refused(const std::function<void(RankContext&)>& body, const std::string& text) {
  try {
    run_group(group_of(2), body);
    FAIL() << "accepted; expected: " << text;
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), AllOf(StartsWith("rank "), HasSubstr(text)));
  }
}

TEST(Failure, WrongArgumentsAreRefusedWithTheirValues) {
  const auto call = [](auto body) {
    return [body](RankContext& ctx) {
      const auto tensor = [&](DType dtype, Shape shape) { return make(ctx, "t", dtype, std::move(shape)); };
      body(ctx.comm(), tensor);
    };
  };
  const DType f32 = DType::f32;
  expect_refused(call([&](Communicator& comm, auto tensor) {
                   std::vector<Tensor> three(3, tensor(f32, {1}));
                   comm.all_to_all("q", three, three);
                 }),
                 "all_to_all 'q' (setup): 3 send tensors for a group of 2");
  expect_refused(call([&](Communicator& comm, auto tensor) {
                   std::vector<Tensor> receive = {tensor(f32, {1}), tensor(DType::bf16, {1})};
                   comm.all_gather("k", tensor(f32, {1}), receive);
                 }),
                 "all_gather 'k' (setup): receive[1] is bf16, expected f32");
  expect_refused(call([&](Communicator& comm, auto tensor) {
                   const Tensor x = tensor(f32, {4, 4, 4, 4}).slice(1, 0, 2).slice(2, 0, 3).slice(3, 0, 2);
                   comm.broadcast("x", x, 0);
                 }),
                 "broadcast 'x' (setup): inout[");
  expect_refused(call([&](Communicator& comm, auto tensor) { comm.broadcast("x", tensor(f32, {1}), 2); }),
                 "root 2 in a group of 2");
  expect_refused(call([&](Communicator& comm, auto tensor) {
                   comm.all_reduce("x", tensor(f32, {4, 4}).slice(1, 0, 2));
                 }),
                 "is not contiguous");
  expect_refused(
      call([&](Communicator& comm, auto tensor) { comm.issue_send("x", tensor(f32, {1}), comm.rank()).wait(); }),
      "must be another rank");
  expect_refused(call([&](Communicator& comm, auto) { comm.broadcast("x", Tensor(), 0); }), "undefined tensor");
  expect_refused(call([&](Communicator& comm, auto tensor) {
                   std::vector<Tensor> send(2, tensor(f32, {3}));
                   comm.reduce_scatter("x", send, tensor(f32, {4}));
                 }),
                 "has 12 bytes, out 16");
}

}  // namespace
}  // namespace isomer
