// What every collective delivers, on both backends (suite.h), against values computed without communication.
#include "comm/suite.h"

namespace isomer {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f64};

INSTANTIATE_TEST_SUITE_P(Collectives, Ranks, testing::Values(1, 2, 3, 4, 7, 8), rank_name);

std::uint64_t u(int rank) { return static_cast<std::uint64_t>(rank); }

void expect(RankContext& ctx, const Tensor& tensor, const std::vector<double>& expected, const std::string& what) {
  const auto got = values(tensor);
  EXPECT_EQ(got, expected) << what << " at rank " << ctx.rank() << " of " << ctx.world_size() << ", "
                           << name_of(tensor.dtype());
  keep(ctx, got);
}

// 0, 1 and odd sizes; uneven between pairs.
std::int64_t pair_count(int from, int to) {
  constexpr std::int64_t kCounts[] = {5, 0, 1, 1003, 17, 64, 3};
  return kCounts[(3 * from + 5 * to) % 7];
}

TEST_P(Ranks, AllToAllWithUnevenAndEmptyBlocks) {
  run([](RankContext& ctx) {
    auto& comm = ctx.comm();
    for (DType dtype : kDTypes) {
      std::vector<Tensor> send, receive;
      for (int peer = 0; peer < comm.size(); ++peer) {
        send.push_back(make(ctx, "q", dtype, {pair_count(ctx.rank(), peer)}));
        fill(send.back(), u(ctx.rank()), u(peer));
        receive.push_back(make(ctx, "q", dtype, {pair_count(peer, ctx.rank())}));
      }
      comm.all_to_all("q", send, receive);
      for (int peer = 0; peer < comm.size(); ++peer)
        expect(ctx, receive[static_cast<std::size_t>(peer)],
               filled(dtype, pair_count(peer, ctx.rank()), u(peer), u(ctx.rank())), "all_to_all");
    }
  });
}

// Tokens to heads without packing: blocks are [t, h_j, w] cut out of [t, h, w], received into [t_j, h_p, w] slices.
TEST_P(Ranks, AllToAllOfStridedViews) {
  run([](RankContext& ctx) {
    auto& comm = ctx.comm();
    const int num_ranks = comm.size();
    const auto tokens_of = [](int rank) { return std::int64_t{3} + rank % 3; };
    std::int64_t total_tokens = 0;
    for (int peer = 0; peer < num_ranks; ++peer) total_tokens += tokens_of(peer);
    for (DType dtype : kDTypes) {
      const std::int64_t width = 5;
      Tensor local = make(ctx, "q", dtype, {tokens_of(ctx.rank()), 2 * num_ranks, width});
      Tensor padded = make(ctx, "q heads", dtype, {total_tokens, 2, width + 3});
      std::vector<Tensor> send, receive;
      std::int64_t token = 0;
      for (int peer = 0; peer < num_ranks; ++peer) {
        send.push_back(local.slice(1, 2 * peer, 2));
        fill(send.back(), u(ctx.rank()), u(peer));
        receive.push_back(padded.slice(2, 0, width).slice(0, token, tokens_of(peer)));
        token += tokens_of(peer);
      }
      comm.all_to_all("q", send, receive);
      for (int peer = 0; peer < num_ranks; ++peer)
        expect(ctx, receive[static_cast<std::size_t>(peer)],
               filled(dtype, tokens_of(peer) * 2 * width, u(peer), u(ctx.rank())), "strided all_to_all");
    }
  });
}

TEST_P(Ranks, AllGatherOfUnevenShares) {
  run([](RankContext& ctx) {
    auto& comm = ctx.comm();
    for (DType dtype : kDTypes) {
      Tensor mine = make(ctx, "latent", dtype, {pair_count(ctx.rank(), 1), 3});
      fill(mine, u(ctx.rank()), 7);
      std::vector<Tensor> receive;
      for (int peer = 0; peer < comm.size(); ++peer)
        receive.push_back(make(ctx, "latent", dtype, {pair_count(peer, 1), 3}));
      comm.all_gather("latent", mine, receive);
      for (int peer = 0; peer < comm.size(); ++peer)
        expect(ctx, receive[static_cast<std::size_t>(peer)], filled(dtype, pair_count(peer, 1) * 3, u(peer), 7),
               "all_gather");
    }
  });
}

TEST_P(Ranks, ReduceScatterSumsInRankOrder) {
  run([](RankContext& ctx) {
    auto& comm = ctx.comm();
    for (DType dtype : kDTypes) {
      std::vector<Tensor> send;
      for (int peer = 0; peer < comm.size(); ++peer) {
        // Rows of 3 cut out of rows of 7, as many rows as the receiver wants.
        send.push_back(make(ctx, "dlatent", dtype, {pair_count(peer, 2), 7}).slice(1, 2, 3));
        fill(send.back(), u(ctx.rank()), u(peer));
      }
      Tensor out = make(ctx, "dlatent", dtype, {pair_count(ctx.rank(), 2), 3});
      comm.reduce_scatter("dlatent", send, out);
      expect(ctx, out, summed(dtype, out.numel(), comm.size(), u(ctx.rank())), "reduce_scatter");
    }
  });
}

TEST_P(Ranks, AllReduceSumsInRankOrder) {
  run([](RankContext& ctx) {
    auto& comm = ctx.comm();
    for (DType dtype : kDTypes) {
      for (std::int64_t count : {0, 1, 5, 1000, 100'003}) {
        Tensor tensor = make(ctx, "dw", dtype, {count});
        fill(tensor, u(ctx.rank()), 3);
        comm.all_reduce("dw", tensor);
        expect(ctx, tensor, summed(dtype, count, comm.size(), 3), "all_reduce");
      }
    }
  });
}

TEST_P(Ranks, BroadcastFromEveryRoot) {
  run([](RankContext& ctx) {
    auto& comm = ctx.comm();
    for (DType dtype : kDTypes) {
      for (int root = 0; root < comm.size(); ++root) {
        Tensor tensor = make(ctx, "x", dtype, {pair_count(root, 3), 2});
        fill(tensor, u(ctx.rank()), 5);
        comm.broadcast("x", tensor, root);
        expect(ctx, tensor, filled(dtype, tensor.numel(), u(root), 5), "broadcast");
      }
    }
  });
}

TEST_P(Ranks, NeighboursExchangeRoundTheRing) {
  if (GetParam() == 1) return;  // a ring of one has no neighbour
  run([](RankContext& ctx) {
    auto& comm = ctx.comm();
    const int next = (ctx.rank() + 1) % comm.size();
    const int previous = (ctx.rank() + comm.size() - 1) % comm.size();
    Tensor sent = make(ctx, "kv", DType::bf16, {pair_count(ctx.rank(), 0), 4});
    fill(sent, u(ctx.rank()), 1);
    for (int hop = 1; hop < comm.size(); ++hop) {
      const int owner = (ctx.rank() + comm.size() - hop) % comm.size();
      Tensor received = make(ctx, "kv", DType::bf16, {pair_count(owner, 0), 4});
      comm.issue_send_receive("kv", sent, next, received, previous).wait();
      expect(ctx, received, filled(DType::bf16, received.numel(), u(owner), 1), "ring");
      sent = received;
    }
  });
}

TEST_P(Ranks, OneWaySendsAlongALine) {
  run([](RankContext& ctx) {
    auto& comm = ctx.comm();
    Tensor x = make(ctx, "x", DType::f32, {1001});
    if (ctx.rank() == 0) fill(x, 11, 0);
    if (ctx.rank() > 0) comm.issue_receive("x", x, ctx.rank() - 1).wait();
    if (ctx.rank() + 1 < comm.size()) comm.issue_send("x", x, ctx.rank() + 1).wait();
    expect(ctx, x, filled(DType::f32, 1001, 11, 0), "line");
  });
}

TEST_P(Ranks, AsynchronousCallsMayBeWaitedForInAnyOrder) {
  run([](RankContext& ctx) {
    auto& comm = ctx.comm();
    constexpr int kCalls = 6;
    std::vector<std::vector<Tensor>> receive(kCalls);
    std::vector<Work> works;
    for (int call = 0; call < kCalls; ++call) {
      // The sent tensor is kept alive by the call alone.
      Tensor mine = make(ctx, "k", DType::f32, {100 * call});
      fill(mine, u(ctx.rank()), u(call));
      for (int peer = 0; peer < comm.size(); ++peer)
        receive[static_cast<std::size_t>(call)].push_back(make(ctx, "k", DType::f32, {100 * call}));
      works.push_back(comm.issue_all_gather("k", mine, receive[static_cast<std::size_t>(call)]));
    }
    for (int call = kCalls; call-- > 0;) {
      works[static_cast<std::size_t>(call)].wait();
      works[static_cast<std::size_t>(call)].wait();  // twice does nothing
      for (int peer = 0; peer < comm.size(); ++peer)
        expect(ctx, receive[static_cast<std::size_t>(call)][static_cast<std::size_t>(peer)],
               filled(DType::f32, 100 * call, u(peer), u(call)), "asynchronous");
    }
  });
}

TEST_P(Ranks, SplitGroupsAreOrderedByKey) {
  run([](RankContext& ctx) {
    const int parity = ctx.rank() % 2;
    auto half = ctx.comm().split(parity, -ctx.rank());  // the highest rank first
    std::vector<int> members;
    for (int rank = ctx.world_size(); rank-- > 0;) {
      if (rank % 2 == parity) members.push_back(rank);
    }
    ASSERT_EQ(half->size(), std::ssize(members));
    ASSERT_EQ(members[static_cast<std::size_t>(half->rank())], ctx.rank());
    Tensor mine = make(ctx, "x", DType::f32, {9});
    fill(mine, u(ctx.rank()), 2);
    std::vector<Tensor> receive;
    for (int peer = 0; peer < half->size(); ++peer) receive.push_back(make(ctx, "x", DType::f32, {9}));
    half->all_gather("x", mine, receive);
    for (std::size_t peer = 0; peer < members.size(); ++peer)
      expect(ctx, receive[peer], filled(DType::f32, 9, u(members[peer]), 2), "split");

    // A split of a split, used while the others still are.
    auto lone = half->split(half->rank(), 0);
    EXPECT_EQ(lone->size(), 1);
    lone->all_reduce("x", mine);
    ctx.comm().all_reduce("x", mine);
    expect(ctx, mine, summed(DType::f32, 9, ctx.world_size(), 2), "all_reduce after split");
  });
}

TEST_P(Ranks, ControlCallsAgreeAndLeaveNoTrace) {
  run([](RankContext& ctx) {
    auto& comm = ctx.comm();
    EXPECT_EQ(comm.max_over_ranks(ctx.rank() == 0 ? -1.5 : -2.5), -1.5);
    const std::string text(static_cast<std::size_t>(ctx.rank()), 'x');
    const auto texts = comm.gather_text(text);
    ASSERT_EQ(std::ssize(texts), ctx.rank() == 0 ? comm.size() : 0);
    for (std::size_t peer = 0; peer < texts.size(); ++peer) EXPECT_EQ(texts[peer], std::string(peer, 'x'));
    EXPECT_TRUE(ctx.ledger().entries().empty());
    EXPECT_EQ(ctx.clock().now_s(), 0);
    comm.barrier();
  });
}

// Blocks beyond the piece that the MPI backend sends at once (4 MiB at two ranks), into rows with gaps.
TEST_P(Ranks, LargeBlocksArriveWhole) {
  run([](RankContext& ctx) {
    auto& comm = ctx.comm();
    constexpr std::int64_t kWidth = 1001;
    const std::int64_t rows = 2400 / comm.size();
    const auto expected = [](int rank, std::int64_t i) { return static_cast<float>(i % 8191 + 10000 * rank); };
    Tensor mine = make(ctx, "latent", DType::f32, {rows * kWidth});
    for (std::int64_t i = 0; i < mine.numel(); ++i) mine.data<float>()[i] = expected(ctx.rank(), i);
    Tensor all = make(ctx, "latent", DType::f32, {comm.size(), rows, kWidth + 3});
    std::vector<Tensor> receive;
    for (int peer = 0; peer < comm.size(); ++peer) receive.push_back(all.select(0, peer).slice(1, 0, kWidth));
    comm.all_gather("latent", mine, receive);
    std::int64_t wrong = 0;
    for (int peer = 0; peer < comm.size(); ++peer) {
      const float* block = receive[static_cast<std::size_t>(peer)].data<float>();
      for (std::int64_t i = 0; i < mine.numel(); ++i)
        wrong += block[i / kWidth * (kWidth + 3) + i % kWidth] == expected(peer, i) ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0);
  });
}

TEST_P(Ranks, DroppedTransfersLeaveReceiveBuffers) {
  run([](RankContext& ctx) {
    auto& comm = ctx.comm();
    comm.drop_transfers(true);
    Tensor mine = make(ctx, "x", DType::f32, {5});
    fill(mine, u(ctx.rank()), 0);
    std::vector<Tensor> receive;
    for (int peer = 0; peer < comm.size(); ++peer) {
      receive.push_back(make(ctx, "x", DType::f32, {5}));
      fill(receive.back(), 99, 99);
    }
    comm.all_gather("x", mine, receive);
    for (const auto& tensor : receive) EXPECT_EQ(values(tensor), filled(DType::f32, 5, 99, 99));
    Tensor sum = make(ctx, "y", DType::f32, {64});
    fill(sum, u(ctx.rank()), 0);
    comm.all_reduce("y", sum);
    const bool same = values(sum) == summed(DType::f32, 64, comm.size(), 0);
    EXPECT_EQ(same, comm.size() == 1);
    comm.drop_transfers(false);
    comm.all_gather("x", mine, receive);
    for (int peer = 0; peer < comm.size(); ++peer)
      EXPECT_EQ(values(receive[static_cast<std::size_t>(peer)]), filled(DType::f32, 5, u(peer), 0));
  });
}

}  // namespace
}  // namespace isomer
