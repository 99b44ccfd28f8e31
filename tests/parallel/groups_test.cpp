// Communicators of inner ranks, outer groups and data-parallel replicas; gradients summed over all of them.
#include "parallel/sequence/groups.h"

#include <gtest/gtest.h>

#include <cmath>

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

/// One block under a layout: the gradients after sync_gradients, and y and dx of the first replica's tokens. Every
/// replica has the same sequences.
struct BlockResult {
  AttentionWeights gradients;
  Tensor y, dx;  // [S·batch, D]
};
BlockResult run(const std::string& text, int ranks, const BlockProblem& p, const BlockData& data,
                const std::vector<std::vector<std::int64_t>>& document_starts = {}) {
  const Layout layout = parse_layout(text);
  BlockResult result{.y = Tensor::unrecorded("y", p.dtype, data.x.shape()),
                     .dx = Tensor::unrecorded("dx", p.dtype, data.x.shape())};
  run_group(group_of(ranks), [&](RankContext& ctx) {
    const auto scheme = make_sequence_scheme(layout, p.config);
    SequenceBlock block{.layer = {p.config, data.weights, {}},
                        .tokens = token_shards_of(layout, p.seq, p.batch),
                        .groups = make_sequence_groups(ctx, layout),
                        .core = p.core,
                        .first_position = p.first_position,
                        .document_starts = document_starts};
    const int rank = block.groups.sequence->rank();
    const auto positions = block.tokens.positions(rank);
    block.layer.rope =
        make_rope_rows(ctx, p.config, p.dtype, p.first_position, positions, p.batch, p.first_position + p.seq);
    // To or from the rank's rows of a tensor of all tokens.
    const auto for_rows = [&](const Tensor& shared, const Tensor& local, bool out) {
      std::int64_t row = 0;
      for (const IndexRange& range : positions) {
        const std::int64_t count = range.count * p.batch;
        const Tensor all = shared.slice(0, range.begin * p.batch, count), mine = local.slice(0, row, count);
        copy(ctx, "rows", out ? mine : all, out ? all : mine);
        row += count;
      }
    };
    const auto rows_of = [&](const Tensor& shared) {
      Tensor local = ctx.empty("x", MemoryClass::saved, p.dtype, {block.tokens.rows(rank), shared.size(1)});
      for_rows(shared, local, false);
      return local;
    };
    auto forward = scheme->forward(ctx, block, rows_of(data.x));
    auto backward = scheme->backward(ctx, block, std::move(forward.saved), rows_of(data.dy));
    if (block.groups.data_rank == 0) {
      for_rows(result.y, forward.y, true);
      for_rows(result.dx, backward.dx, true);
    }
    sync_gradients(ctx, block, backward.gradients);
    EXPECT_EQ(ctx.ledger().bytes_sent(Phase::gradient_sync), gradient_sync_bytes_sent(layout, p.config, ctx.rank()));
    EXPECT_EQ(backward.gradients.kv_b_heads.count, p.config.num_attention_heads);
    if (ctx.rank() == 0) result.gradients = backward.gradients.tensors;
  });
  return result;
}

TEST(DataParallel, GradientsAreSummedOverReplicas) {
  const BlockProblem p = small_problem(small_config(4), 21, DType::f32, AttentionCore::fused);
  const BlockData data = seeded_data(p);
  for (const std::string layout :
       {"laga:2", "laga:2,ring:2", "laga:2,latent-ring:2", "explicit:2", "latent-gather:3"}) {
    const int ranks = sequence_ranks_of(parse_layout(layout));
    const AttentionWeights one = run(layout, ranks, p, data).gradients;
    const AttentionWeights two = run(layout + ",dp:2", 2 * ranks, p, data).gradients;
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

double largest_difference(const Tensor& a, const Tensor& b) {
  double largest = 0;
  for (std::int64_t row = 0; row < a.size(0); ++row) {
    for (std::int64_t i = 0; i < a.size(1); ++i) {
      const double difference = std::abs(static_cast<double>(a.data<float>()[row * a.stride(0) + i]) -
                                         static_cast<double>(b.data<float>()[row * b.stride(0) + i]));
      largest = std::isnan(difference) ? INFINITY : std::max(largest, difference);
    }
  }
  return largest;
}

// A document in a packed sequence is what it is alone at the same positions, under every scheme.
TEST(PackedDocuments, SeeThemselvesOnly) {
  BlockProblem p = small_problem(small_config(4), 23, DType::f32, AttentionCore::fused, 1);
  const BlockData data = seeded_data(p);
  const std::vector<std::int64_t> starts = {0, 1, 9, 18};
  const Tensor y = Tensor::unrecorded("y", p.dtype, data.x.shape());
  const Tensor dx = Tensor::unrecorded("dx", p.dtype, data.x.shape());
  for (std::size_t i = 0; i < starts.size(); ++i) {
    const std::int64_t length = (i + 1 < starts.size() ? starts[i + 1] : p.seq) - starts[i];
    BlockProblem alone = p;
    alone.seq = length;
    alone.first_position = p.first_position + starts[i];
    const BlockResult one = run(
        "explicit:1", 1, alone,
        {.weights = data.weights, .x = data.x.slice(0, starts[i], length), .dy = data.dy.slice(0, starts[i], length)});
    std::copy_n(one.y.data<float>(), one.y.numel(), y.slice(0, starts[i], length).data<float>());
    std::copy_n(one.dx.data<float>(), one.dx.numel(), dx.slice(0, starts[i], length).data<float>());
  }
  for (const std::string layout :
       {"explicit:1", "explicit:4", "laga:2", "laga:2,kv=strided", "absorbed:4", "ring:3", "latent-gather:4,rows=3",
        "latent-ring:3,rows=2", "laga:2,ring:2", "laga:2,latent-ring:2"}) {
    for (const AttentionCore core : {AttentionCore::fused, AttentionCore::eager}) {
      const Layout parsed = parse_layout(layout);
      if (!why_unfit(parsed, p.config, sequence_ranks_of(parsed), p.seq, core).empty()) continue;
      p.core = core;
      const BlockResult packed = run(layout, sequence_ranks_of(parsed), p, data, {starts});
      EXPECT_LE(largest_difference(packed.y, y), 1e-4) << layout << ' ' << name_of(core);
      EXPECT_LE(largest_difference(packed.dx, dx), 1e-3) << layout << ' ' << name_of(core);
    }
  }
  EXPECT_GT(largest_difference(run("explicit:1", 1, p, data).y, y), 0.1) << "documents make a difference here";
}

}  // namespace
}  // namespace isomer
