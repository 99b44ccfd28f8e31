// The one way in which an operation runs: enter its cost in the record, return at once in a dry run, time it
// otherwise. Kernels below this line neither allocate, log, read the environment nor check.
#pragma once

#include <string_view>

#include "core/rank_context.h"

namespace isomer {

/// Runs body() as operation `name`; not at all in a dry run. The virtual clock advances by the processor time of the
/// thread that worked longest.
template <class Body>
void run_kernel(RankContext& ctx, std::string_view name, const OpCost& cost, Body&& body) {
  ctx.heartbeat().fetch_add(1, std::memory_order_relaxed);
  if (ctx.dry_run()) {
    ctx.ops().enter(ctx.phase(), name, cost, 0, 0);
    return;
  }
  const double cpu_begin = thread_cpu_s();
  const double wall_begin = wall_clock_s();
  body();
  const double wall_s = wall_clock_s() - wall_begin;
  // With several threads the caller may idle while a worker finishes; wall time then bounds the operation.
  const double cpu_s = ctx.threads().num_threads() > 1 ? wall_s : thread_cpu_s() - cpu_begin;
  ctx.clock().advance(cpu_s);
  ctx.ops().enter(ctx.phase(), name, cost, cpu_s, wall_s);
}

}  // namespace isomer
