// Communicators of inner ranks, outer groups and data-parallel replicas; gradients summed over all of them.
#include "parallel/sequence/groups.h"

#include <gtest/gtest.h>

#include <mutex>

#include "comm/group.h"
#include "cost/scheme_bytes.h"
#include "parallel/block_fixture.h"
#include "parallel/sequence/scheme.h"

namespace isomer {
namespace {

using testing::seeded_data;
using testing::small_config;
using testing::small_problem;

GroupOptions group_of(int ranks, bool dry = false) {
  GroupOptions group;
  group.num_ranks = ranks;
  group.threads_per_rank = 1;
  group.timeout_s = 20;
  group.dry_run = dry;
  return group;
}

TEST(SequenceGroups, PlaceEveryRank) {
  for (const bool dry : {false, true}) {
    run_group(group_of(12, dry), [](RankContext& ctx) {
      const SequenceGroups g = make_sequence_groups(ctx, parse_layout("laga:2,ring:3,dp:2"));
      EXPECT_EQ(g.data_size, 2);
      EXPECT_EQ(g.data_rank, ctx.rank() / 6);
      EXPECT_EQ(g.sequence->size(), 6);
      EXPECT_EQ(g.sequence->rank(), ctx.rank() % 6);
      EXPECT_EQ(g.inner->size(), 2);
      EXPECT_EQ(g.inner->rank(), ctx.rank() % 2);
      EXPECT_EQ(g.outer->size(), 3);
      EXPECT_EQ(g.outer->rank(), ctx.rank() % 6 / 2);
      EXPECT_EQ(g.same_heads->size(), 6);
      EXPECT_EQ(g.same_heads->rank(), ctx.rank() / 2);
    });
  }
}

TEST(SequenceGroups, SpeakToTheirOwnAndLoseWhatIsDropped) {
  for (const bool drop : {false, true}) {
    run_group(group_of(8), [drop](RankContext& ctx) {
      const SequenceGroups g = make_sequence_groups(ctx, parse_layout("laga:2,ring:2,dp:2"));
      ctx.comm().drop_transfers(drop);
      const auto sum_over = [&](Communicator& comm) {
        const Tensor t = ctx.empty("t", MemoryClass::workspace, DType::f32, {1});
        t.data<float>()[0] = static_cast<float>(1 << ctx.rank());
        comm.all_reduce("t", t);
        return static_cast<int>(t.data<float>()[0]);
      };
      const int first = ctx.rank() / 4 * 4, own = 1 << ctx.rank();
      const int inner = 3 << (ctx.rank() / 2 * 2), outer = 5 << (first + ctx.rank() % 2), sequence = 15 << first;
      EXPECT_EQ(sum_over(*g.inner), drop ? own : inner);
      EXPECT_EQ(sum_over(*g.outer), drop ? own : outer);
      EXPECT_EQ(sum_over(*g.sequence), drop ? own : sequence);
      EXPECT_EQ(sum_over(*g.same_heads), drop ? own : 0b01010101 << ctx.rank() % 2);
    });
  }
}

TEST(SequenceGroups, RefuseOtherNumbersOfRanks) {
  EXPECT_THROW(run_group(group_of(4), [](RankContext& ctx) { make_sequence_groups(ctx, parse_layout("laga:2,dp:3")); }),
               std::exception);
}

/// The gradients of one block after sync_gradients, at rank 0; every replica has the same sequences.
AttentionWeights synced_gradients(const std::string& text, int ranks, const BlockProblem& p, const BlockData& data) {
  const Layout layout = parse_layout(text);
  AttentionWeights result;
  run_group(group_of(ranks), [&](RankContext& ctx) {
    const auto scheme = make_sequence_scheme(layout, p.config);
    SequenceBlock block{.layer = {p.config, data.weights, {}},
                        .tokens = token_shards_of(layout, p.seq, p.batch),
                        .groups = make_sequence_groups(ctx, layout)};
    const int rank = block.groups.sequence->rank();
    const auto positions = block.tokens.positions(rank);
    block.layer.rope = make_rope_rows(ctx, p.config, p.dtype, 0, positions, p.batch, p.seq);
    const auto rows_of = [&](const Tensor& shared) {
      const Tensor local = ctx.empty("x", MemoryClass::saved, p.dtype, {block.tokens.rows(rank), shared.size(1)});
      std::int64_t row = 0;
      for (const IndexRange& range : positions) {
        const std::int64_t count = range.count * p.batch;
        copy(ctx, "x", shared.slice(0, range.begin * p.batch, count), local.slice(0, row, count));
        row += count;
      }
      return local;
    };
    auto forward = scheme->forward(ctx, block, rows_of(data.x));
    auto backward = scheme->backward(ctx, block, std::move(forward.saved), rows_of(data.dy));
    sync_gradients(ctx, block, backward.gradients);
    EXPECT_EQ(ctx.ledger().bytes_sent(Phase::gradient_sync), gradient_sync_bytes_sent(layout, p.config, ctx.rank()));
    EXPECT_EQ(backward.gradients.kv_b_heads.count, p.config.num_attention_heads);
    if (ctx.rank() == 0) result = backward.gradients.tensors;
  });
  return result;
}

TEST(DataParallel, GradientsAreSummedOverReplicas) {
  const BlockProblem p = small_problem(small_config(4), 21, DType::f32, AttentionCore::fused);
  const BlockData data = seeded_data(p);
  for (const std::string layout :
       {"laga:2", "laga:2,ring:2", "laga:2,latent-ring:2", "explicit:2", "latent-gather:3"}) {
    const int ranks = sequence_ranks_of(parse_layout(layout));
    const AttentionWeights one = synced_gradients(layout, ranks, p, data);
    const AttentionWeights two = synced_gradients(layout + ",dp:2", 2 * ranks, p, data);
    std::map<std::string, Tensor> expected;
    one.for_each([&](std::string_view name, const Tensor& t) { expected[std::string(name)] = t; });
    std::size_t compared = 0;
    two.for_each([&](std::string_view name, const Tensor& t) {
      const float *a = expected.at(std::string(name)).data<float>(), *b = t.data<float>();
      double largest = 0, difference = 0;
      for (std::int64_t i = 0; i < t.numel(); ++i) {
        largest = std::max(largest, static_cast<double>(std::abs(b[i])));
        difference = std::max(difference, static_cast<double>(std::abs(2 * a[i] - b[i])));
      }
      EXPECT_GT(largest, 0) << layout << " " << name;
      EXPECT_LE(difference, 8 * epsilon_of(DType::f32) * largest) << layout << " " << name;  // sums in another order
      ++compared;
    });
    EXPECT_EQ(compared, expected.size());
  }
}

}  // namespace
}  // namespace isomer
