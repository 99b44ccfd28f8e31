// The virtual clock, the link model, the ledger and the record of operations.
#include "core/record.h"

#include <gtest/gtest.h>

#include "core/rank_context.h"
#include "core/virtual_clock.h"
#include "kernels/dispatch.h"

namespace isomer {
namespace {

TEST(LinkModel, IsOneFullDuplexPortARank) {
  const LinkModel link{.latency_s = 5e-6, .bandwidth_bytes_per_s = 2e9};
  EXPECT_DOUBLE_EQ(link.transfer_s(0, 0, 1), 5e-6);
  EXPECT_DOUBLE_EQ(link.transfer_s(2e6, 1e6, 1), 5e-6 + 1e-3);  // the larger direction, not the sum
  EXPECT_DOUBLE_EQ(link.transfer_s(1e6, 2e6, 1), 5e-6 + 1e-3);
  EXPECT_DOUBLE_EQ(link.transfer_s(2e6, 0, 2), 1e-5 + 1e-3);
  const LinkModel endless{.latency_s = 1e-6};
  EXPECT_DOUBLE_EQ(endless.transfer_s(1e12, 0, 1), 1e-6);
  EXPECT_EQ(LinkModel{}.transfer_s(1e12, 1e12, 3), 0);
}

TEST(VirtualClock, AdvancesAndWaits) {
  VirtualClock clock;
  clock.advance(2);
  clock.wait_until(1);  // already past
  EXPECT_EQ(clock.now_s(), 2);
  EXPECT_EQ(clock.waited_s(), 0);
  clock.wait_until(5);
  clock.advance(1);
  clock.wait_until(7);
  EXPECT_EQ(clock.now_s(), 7);
  EXPECT_EQ(clock.waited_s(), 4);
}

TEST(Ledger, SumsByPhase) {
  Ledger ledger;
  ledger.enter({Collective::all_to_all, "q", Phase::forward, 4, 100, 90, 3});
  ledger.enter({Collective::all_gather, "latent", Phase::forward, 4, 10, 30, 3});
  ledger.enter({Collective::reduce_scatter, "d latent", Phase::backward, 4, 7, 8, 3});
  EXPECT_EQ(ledger.bytes_sent(Phase::forward), 110);
  EXPECT_EQ(ledger.bytes_received(Phase::forward), 120);
  EXPECT_EQ(ledger.bytes_sent(Phase::backward), 7);
  EXPECT_EQ(ledger.bytes_received(Phase::gradient_sync), 0);
  ledger.clear();
  EXPECT_EQ(ledger.bytes_sent(Phase::forward), 0);
}

void spin(double seconds) {
  const double begin_s = thread_cpu_s();
  while (thread_cpu_s() - begin_s < seconds) {}
}

TEST(RunKernel, EntersCostAndTimeUnderItsPhase) {
  RankContext ctx({});
  {
    const PhaseScope phase(ctx, Phase::forward);
    run_kernel(ctx, "work", {10, 20, 30}, [] { spin(0.01); });
    run_kernel(ctx, "work", {1, 2, 3}, [] {});
  }
  EXPECT_EQ(ctx.phase(), Phase::setup);
  EXPECT_EQ(ctx.ops().flops(Phase::forward), 11);
  EXPECT_EQ(ctx.ops().flops(Phase::backward), 0);
  EXPECT_GE(ctx.ops().cpu_s(), 0.01);
  EXPECT_GE(ctx.ops().wall_s(), 0.01);
  EXPECT_DOUBLE_EQ(ctx.clock().now_s(), ctx.ops().cpu_s());
  EXPECT_EQ(ctx.heartbeat(), 2u);
}

TEST(RunKernel, OfADryRunCostsTheSameAndDoesNothing) {
  RankContext ctx({.dry_run = true});
  const PhaseScope phase(ctx, Phase::backward);
  run_kernel(ctx, "work", {10, 20, 30}, [] { FAIL() << "a dry run has no values"; });
  EXPECT_EQ(ctx.ops().flops(Phase::backward), 10);
  EXPECT_EQ(ctx.ops().cpu_s(), 0);
  EXPECT_EQ(ctx.clock().now_s(), 0);
}

}  // namespace
}  // namespace isomer
