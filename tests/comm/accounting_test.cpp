// The ledger against closed forms, dry runs against real ones, and the clocks.
#include <chrono>
#include <thread>

#include "comm/suite.h"

namespace isomer {
namespace {

class Accounting : public Ranks {};
INSTANTIATE_TEST_SUITE_P(Comm, Accounting, testing::Values(1, 2, 3, 4, 7, 8), rank_name);

std::vector<Tensor> blocks(RankContext& ctx, DType dtype, const std::vector<std::int64_t>& counts) {
  std::vector<Tensor> tensors;
  for (auto count : counts) {
    tensors.push_back(make(ctx, "block", dtype, {count}));
    if (!ctx.dry_run()) fill(tensors.back(), 0, 0);
  }
  return tensors;
}

// Tokens and heads of an uneven sharding.
std::int64_t tokens(int rank) { return 3 + rank % 4; }
std::int64_t heads(int rank) { return 1 + rank % 2; }

struct Totals {
  std::int64_t tokens = 0, heads = 0;
};
Totals totals(int num_ranks) {
  Totals sum;
  for (int rank = 0; rank < num_ranks; ++rank) {
    sum.tokens += tokens(rank);
    sum.heads += heads(rank);
  }
  return sum;
}

/// One of everything.
void all_collectives(RankContext& ctx) {
  auto& comm = ctx.comm();
  const int num_ranks = comm.size(), rank = ctx.rank();
  std::vector<std::int64_t> to_heads, from_tokens, shares;
  for (int peer = 0; peer < num_ranks; ++peer) {
    to_heads.push_back(tokens(rank) * heads(peer));
    from_tokens.push_back(tokens(peer) * heads(rank));
    shares.push_back(tokens(peer));
  }
  {
    PhaseScope phase(ctx, Phase::forward);
    comm.all_to_all("q", blocks(ctx, DType::bf16, to_heads), blocks(ctx, DType::bf16, from_tokens));
    comm.all_gather("latent", blocks(ctx, DType::bf16, {tokens(rank)})[0], blocks(ctx, DType::bf16, shares));
  }
  PhaseScope phase(ctx, Phase::backward);
  comm.reduce_scatter("dlatent", blocks(ctx, DType::f32, shares), blocks(ctx, DType::f32, {tokens(rank)})[0]);
  comm.all_reduce("dw", blocks(ctx, DType::f64, {13})[0]);
  comm.broadcast("x", blocks(ctx, DType::f32, {5})[0], num_ranks - 1);
  if (num_ranks > 1) {
    const int next = (rank + 1) % num_ranks, previous = (rank + num_ranks - 1) % num_ranks;
    comm.issue_send_receive("kv", blocks(ctx, DType::f32, {tokens(rank)})[0], next,
                            blocks(ctx, DType::f32, {tokens(previous)})[0], previous);
  }
  comm.barrier();
  auto pair = comm.split(rank / 2, rank);
  pair->all_reduce("half", blocks(ctx, DType::f32, {7})[0]);
}

void expect_entry(const LedgerEntry& entry, Collective collective, Phase phase, std::int64_t sent,
                  std::int64_t received, std::int64_t messages) {
  EXPECT_EQ(entry.collective, collective);
  EXPECT_EQ(entry.phase, phase);
  EXPECT_EQ(entry.bytes_sent, sent) << name_of(collective);
  EXPECT_EQ(entry.bytes_received, received) << name_of(collective);
  EXPECT_EQ(entry.messages, messages) << name_of(collective);
}

TEST_P(Accounting, TheLedgerEqualsTheClosedForms) {
  run([](RankContext& ctx) {
    all_collectives(ctx);
    const int rank = ctx.rank();
    const std::int64_t n = ctx.comm().size();
    const auto [s, h] = totals(static_cast<int>(n));
    const std::int64_t t_p = tokens(rank), h_p = heads(rank);
    const auto& entries = ctx.ledger().entries();
    ASSERT_EQ(std::ssize(entries), n > 1 ? 8 : 7);
    auto entry = entries.begin();
    expect_entry(*entry++, Collective::all_to_all, Phase::forward, 2 * t_p * (h - h_p), 2 * (s - t_p) * h_p, n - 1);
    expect_entry(*entry++, Collective::all_gather, Phase::forward, 2 * (n - 1) * t_p, 2 * (s - t_p), n - 1);
    expect_entry(*entry++, Collective::reduce_scatter, Phase::backward, 4 * (s - t_p), 4 * (n - 1) * t_p, n - 1);
    const std::int64_t x = 13, x_p = x / n + (rank < x % n ? 1 : 0);
    expect_entry(*entry++, Collective::all_reduce, Phase::backward, 8 * ((x - x_p) + (n - 1) * x_p),
                 8 * ((x - x_p) + (n - 1) * x_p), 2 * (n - 1));
    const bool root = rank == n - 1;
    expect_entry(*entry++, Collective::broadcast, Phase::backward, root ? 20 * (n - 1) : 0, root ? 0 : 20,
                 root ? n - 1 : 0);
    if (n > 1) {
      const int previous = static_cast<int>((rank + n - 1) % n);
      expect_entry(*entry++, Collective::send_receive, Phase::backward, 4 * t_p, 4 * tokens(previous), 1);
    }
    expect_entry(*entry++, Collective::barrier, Phase::backward, 0, 0, 0);
    EXPECT_EQ(entry->group_size, rank / 2 * 2 + 1 < n ? 2 : 1);
    EXPECT_EQ(entry->tensor, "half");
    EXPECT_EQ(entries[0].tensor, "q");
    EXPECT_EQ(entries[0].group_size, n);
  });
}

struct Seen {
  std::vector<LedgerEntry> entries;
  std::int64_t peak = 0;
  std::size_t ops = 0;
  double flops = 0;
};

std::vector<Seen> seen(const GroupOptions& options) {
  std::vector<Seen> all(static_cast<std::size_t>(options.num_ranks));
  run_group(options, [&](RankContext& ctx) {
    all_collectives(ctx);
    all[static_cast<std::size_t>(ctx.rank())] = {ctx.ledger().entries(), ctx.memory().peak_activation_bytes(),
                                                 ctx.ops().summaries().size(), ctx.ops().flops(Phase::backward)};
  });
  return all;
}

TEST_P(Accounting, ADryRunRecordsWhatARealOneDoes) {
  if (under_mpirun()) return;  // one process sees only its own rank
  auto options = suite_options(GetParam());
  const auto real = seen(options);
  options.dry_run = true;
  const auto dry = seen(options);
  for (std::size_t rank = 0; rank < real.size(); ++rank) {
    ASSERT_EQ(real[rank].entries.size(), dry[rank].entries.size());
    for (std::size_t i = 0; i < real[rank].entries.size(); ++i) {
      const auto &a = real[rank].entries[i], &b = dry[rank].entries[i];
      expect_entry(b, a.collective, a.phase, a.bytes_sent, a.bytes_received, a.messages);
      EXPECT_EQ(a.tensor, b.tensor);
      EXPECT_EQ(a.group_size, b.group_size);
    }
    EXPECT_EQ(real[rank].peak, dry[rank].peak);
    EXPECT_EQ(real[rank].ops, dry[rank].ops);
    EXPECT_EQ(real[rank].flops, dry[rank].flops);
  }
}

TEST(Dry, RanksRunOneAfterAnotherAndMeetInControlCalls) {
  constexpr int kRanks = 128;
  std::vector<int> order;
  run_group({.num_ranks = kRanks, .dry_run = true}, [&](RankContext& ctx) {
    order.push_back(ctx.rank());
    Tensor huge = make(ctx, "k", DType::bf16, {std::int64_t{1} << 40});
    EXPECT_TRUE(huge.shape_only());
    ctx.comm().all_reduce("k", huge);
    EXPECT_EQ(ctx.comm().max_over_ranks(ctx.rank()), kRanks - 1);
    const auto texts = ctx.comm().gather_text(fmt::format("rank {}", ctx.rank()));
    EXPECT_EQ(ctx.rank() == 0 ? texts.at(127) : "rank 127", "rank 127");
  });
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(order[static_cast<std::size_t>(rank)], rank);
}

// Staging is a communication tensor of the shares of the others, and stands only during the call.
TEST(Memory, StagingIsRecorded) {
  run_group({.num_ranks = 4, .threads_per_rank = 1}, [](RankContext& ctx) {
    Tensor x = ctx.zeros("x", MemoryClass::weight, DType::f32, {10});
    ctx.memory().open_window();
    ctx.comm().all_reduce("x", x);
    const std::int64_t share = ctx.rank() < 2 ? 3 : 2;
    EXPECT_EQ(ctx.memory().peak_activation_bytes(), 3 * share * 4);
    EXPECT_EQ(ctx.memory().standing_at_peak().at(0).name, "x staging");
    EXPECT_EQ(ctx.memory().current_bytes(MemoryClass::communication), 0);
  });
}

constexpr double kLatency_s = 1e-3;
constexpr double kBandwidth = 1e6;

GroupOptions with_link(int num_ranks) {
  auto options = suite_options(num_ranks);
  options.link = {.latency_s = kLatency_s, .bandwidth_bytes_per_s = kBandwidth};  // on the virtual clock alone
  return options;
}

TEST_P(Accounting, ACollectiveCompletesAfterTheLatestIssueAndTheLink) {
  const int num_ranks = GetParam();
  if (num_ranks == 1) return;
  run_group(with_link(num_ranks), [&](RankContext& ctx) {
    auto& comm = ctx.comm();
    ctx.clock().advance(0.5 * ctx.rank());
    const double latest_s = 0.5 * (num_ranks - 1);
    comm.barrier();
    EXPECT_DOUBLE_EQ(ctx.clock().now_s(), latest_s + kLatency_s);
    EXPECT_DOUBLE_EQ(ctx.clock().waited_s(), latest_s + kLatency_s - 0.5 * ctx.rank());

    const double begin_s = ctx.clock().now_s();
    std::vector<std::int64_t> counts(static_cast<std::size_t>(num_ranks), 1000);
    comm.all_gather("k", blocks(ctx, DType::f32, {1000})[0], blocks(ctx, DType::f32, counts));
    const double gather_s = kLatency_s + 4000.0 * (num_ranks - 1) / kBandwidth;
    EXPECT_NEAR(ctx.clock().now_s(), begin_s + gather_s, 1e-9);
  });
}

TEST(Clock, AllReduceTakesTwoRounds) {
  run_group(with_link(2), [](RankContext& ctx) {
    const auto x = blocks(ctx, DType::f32, {1000});
    ctx.comm().all_reduce("x", x[0]);
    // The sum between the rounds takes processor time.
    const double link_s = 2 * kLatency_s + 2 * 2000 / kBandwidth;
    EXPECT_NEAR(ctx.clock().waited_s(), link_s, link_s);
    EXPECT_GE(ctx.clock().now_s(), link_s - 1e-9);
  });
}

TEST(Clock, AsynchronousCallsQueueOnThePortAndOverlapWithWork) {
  run_group(with_link(2), [](RankContext& ctx) {
    auto& comm = ctx.comm();
    const auto mine = blocks(ctx, DType::f32, {1000});
    const auto receive = blocks(ctx, DType::f32, {1000, 1000});
    const auto receive_too = blocks(ctx, DType::f32, {1000, 1000});
    const double one_s = kLatency_s + 4000 / kBandwidth;
    Work first = comm.issue_all_gather("k", mine[0], receive);
    Work second = comm.issue_all_gather("v", mine[0], receive_too);
    ctx.clock().advance(1.5 * one_s);
    first.wait();
    EXPECT_NEAR(ctx.clock().now_s(), 1.5 * one_s, 1e-12);  // hidden
    second.wait();
    EXPECT_NEAR(ctx.clock().now_s(), 2 * one_s, 1e-12);  // queued behind the first
    EXPECT_NEAR(ctx.clock().waited_s(), 0.5 * one_s, 1e-12);
  });
}

TEST(Clock, APairWaitsForItsLaterRankOnly) {
  run_group(with_link(3), [](RankContext& ctx) {
    const auto x = blocks(ctx, DType::f32, {1000});
    ctx.clock().advance(ctx.rank() + 1.0);
    const double one_s = kLatency_s + 4000 / kBandwidth;
    if (ctx.rank() == 0) {
      ctx.comm().issue_send("x", x[0], 1).wait();
      EXPECT_NEAR(ctx.clock().now_s(), 2 + one_s, 1e-12);
    } else if (ctx.rank() == 1) {
      ctx.comm().issue_receive("x", x[0], 0).wait();
      EXPECT_NEAR(ctx.clock().now_s(), 2 + one_s, 1e-12);
    } else {
      EXPECT_EQ(ctx.clock().now_s(), 3);
    }
  });
}

TEST(Clock, WithoutALinkTheCopyBandwidthOfTheMachineCounts) {
  run_group(suite_options(2), [](RankContext& ctx) {
    const auto x = blocks(ctx, DType::f32, {1 << 20});
    const auto receive = blocks(ctx, DType::f32, {1 << 20, 1 << 20});
    ctx.comm().all_gather("x", x[0], receive);
    EXPECT_GT(ctx.clock().now_s(), (4 << 20) / 1e12);
    EXPECT_LT(ctx.clock().now_s(), (4 << 20) / 1e6);
  });
}

TEST(Link, AnEmulatedTransferTakesItsTime) {
  auto options = suite_options(2);
  options.link = {.latency_s = 0.02, .bandwidth_bytes_per_s = 1e5, .emulated = true};
  if (clock_is_virtual(options)) GTEST_SKIP() << "fewer cores than ranks";
  run_group(options, [](RankContext& ctx) {
    const auto x = blocks(ctx, DType::f32, {1000});
    const auto receive = blocks(ctx, DType::f32, {1000, 1000});
    const double begin_s = wall_clock_s();
    Work work = ctx.comm().issue_all_gather("x", x[0], receive);
    work.wait();
    EXPECT_GE(wall_clock_s() - begin_s, 0.06);
    ctx.comm().all_reduce("x", x[0]);
    EXPECT_GE(wall_clock_s() - begin_s, 0.06 + 2 * 0.02 + 0.04);
  });
}

TEST(Link, RanksBeyondTheCoresUseTheVirtualClock) {
  GroupOptions options;
  options.num_ranks = 4096;
  EXPECT_TRUE(clock_is_virtual(options));
  EXPECT_EQ(threads_per_rank(options), 1);
  options.num_ranks = 1;
  EXPECT_FALSE(clock_is_virtual(options));
  options.threads_per_rank = 3;
  EXPECT_EQ(threads_per_rank(options), 3);
}

}  // namespace
}  // namespace isomer
