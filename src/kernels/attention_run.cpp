#include "kernels/attention_run.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace isomer {

namespace {

constexpr std::int64_t kWantedTasks = 16;     // parallel work to cut out where there are few heads and columns
constexpr std::int64_t kMinSplitKeys = 1024;  // shorter key ranges are not split
constexpr std::int64_t kSplitMultiple = 128;  // splits begin at whole key blocks
constexpr std::int64_t kMaxHeadGroups = 16;   // sums of dk_rope
constexpr std::int64_t kWantedKeyHeads = 2;   // with fewer the columns are cut into chunks, at the price of their sums

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return b == 0 ? 0 : (a + b - 1) / b; }

DType sum_dtype(const AttentionShape& s) { return s.dtype == DType::f64 ? DType::f64 : DType::f32; }

/// Scratch of the calling thread, kept for the next call.
char* thread_scratch(std::int64_t bytes) {
  struct Buffer {
    char* data = nullptr;
    std::int64_t bytes = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffer;
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    buffer.bytes = ceil_div(bytes, 4096) * 4096;
    buffer.data = static_cast<char*>(std::aligned_alloc(4096, static_cast<std::size_t>(buffer.bytes)));
    if (buffer.data == nullptr) throw Error(fmt::format("out of memory: {} bytes of attention scratch", bytes));
  }
  return buffer.data;
}

/// Enters in the rank's record what its threads hold as scratch, once: only growth is added.
void report_scratch(RankContext& ctx, std::int64_t bytes_per_thread) {
  thread_local const MemoryRecord* reported_to = nullptr;
  thread_local std::int64_t reported = 0;
  if (reported_to != &ctx.memory() || ctx.memory().untracked_bytes() == 0) reported = 0;
  reported_to = &ctx.memory();
  const std::int64_t bytes = bytes_per_thread * ctx.threads().num_threads();
  if (bytes <= reported) return;
  ctx.memory().add_untracked(bytes - reported);
  reported = bytes;
}

}  // namespace

ForwardPlan::ForwardPlan(RankContext& ctx, const AttentionShape& shape, const AttentionBlockKernels& kernels)
    : block_columns(kernels.forward_block_columns(shape)),
      num_blocks(ceil_div(shape.num_columns(), block_columns)),
      split_keys(shape.num_keys),
      scratch_bytes(kernels.forward_scratch_bytes(shape)) {
  report_scratch(ctx, scratch_bytes);
  const std::int64_t tasks = shape.num_kv_heads * num_blocks;
  if (tasks == 0 || tasks >= kWantedTasks || shape.num_keys < 2 * kMinSplitKeys) return;
  num_splits = std::min(ceil_div(kWantedTasks, tasks), shape.num_keys / kMinSplitKeys);
  split_keys = ceil_div(ceil_div(shape.num_keys, num_splits), kSplitMultiple) * kSplitMultiple;
  num_splits = ceil_div(shape.num_keys, split_keys);
  if (num_splits == 1) return;
  const std::int64_t columns = std::min(block_columns, shape.num_columns());
  partial_out = ctx.empty("attention.partial_out", MemoryClass::workspace, sum_dtype(shape),
                          {tasks, num_splits, columns, shape.value_width});
  partial_lse =
      ctx.empty("attention.partial_lse", MemoryClass::workspace, sum_dtype(shape), {tasks, num_splits, columns});
}

BackwardPlan::BackwardPlan(RankContext& ctx, const AttentionShape& shape, const AttentionGradients& gradients,
                           const AttentionBlockKernels& kernels)
    : block_columns(kernels.backward_block_columns(shape)),
      num_blocks(ceil_div(shape.num_columns(), block_columns)),
      num_groups(shape.rope_width > 0 ? std::min(shape.num_kv_heads, kMaxHeadGroups) : shape.num_kv_heads),
      scratch_bytes(kernels.backward_scratch_bytes(shape)) {
  report_scratch(ctx, scratch_bytes);
  if (shape.num_kv_heads > 0 && shape.num_kv_heads < kWantedKeyHeads)
    num_chunks = std::max<std::int64_t>(1, std::min(kWantedKeyHeads / shape.num_kv_heads, num_blocks));
  const DType dtype = sum_dtype(shape);
  const std::int64_t tasks = num_groups * num_chunks;
  const auto sums = [&](std::string_view name, std::int64_t slots, std::int64_t width) {
    return ctx.empty(name, MemoryClass::workspace, dtype, {slots, shape.num_keys, width});
  };
  const bool chunked = num_chunks > 1;
  dk_first_in_place = chunked && gradients.dk.dtype() == dtype;
  dv_first_in_place = chunked && gradients.dv.dtype() == dtype;
  slot_per_task = tasks <= ctx.threads().num_threads();  // any thread may take a task, also one beyond their number
  const auto slots = [&](bool first_in_place) {
    if (chunked) return shape.num_kv_heads * (num_chunks - (first_in_place ? 1 : 0));
    return std::min<std::int64_t>(tasks, ctx.threads().num_threads());
  };
  if (chunked || gradients.dk.dtype() != dtype)
    dk_sums[0] = sums("attention.dk_sums", slots(dk_first_in_place), shape.key_width);
  if (chunked || gradients.dv.dtype() != dtype)
    dv_sums = sums("attention.dv_sums", slots(dv_first_in_place), shape.value_width);
  if (shape.rope_width > 0 && (tasks > 1 || gradients.dk_rope.dtype() != dtype))
    dk_sums[1] = sums("attention.dk_rope_sums", tasks, shape.rope_width);
}

namespace {

/// Calls body with a value of the type that sums have: float, or double for float64 inputs.
template <class Fn>
void visit_sums(const AttentionShape& shape, Fn&& body) {
  if (shape.dtype == DType::f64) {
    body(double{});
  } else {
    body(float{});
  }
}

/// Merges the splits of one column block in order, into the first.
template <class Sum>
void merge_splits(const AttentionProblem& p, const ForwardPlan& plan, std::int64_t task) {
  const AttentionShape& s = p.shape;
  const std::int64_t columns = plan.partial_lse.size(2);
  const std::int64_t block = task % plan.num_blocks;
  const std::int64_t begin = block * plan.block_columns;
  const std::int64_t count = std::min(plan.block_columns, s.num_columns() - begin);
  const Sum* out = plan.partial_out.data<Sum>() + task * plan.num_splits * columns * s.value_width;
  const Sum* lse = plan.partial_lse.data<Sum>() + task * plan.num_splits * columns;
  for (std::int64_t c = 0; c < count; ++c) {
    const std::int64_t row = p.queries.row[(begin + c) / s.group_size()];
    const std::int64_t head = task / plan.num_blocks * s.group_size() + (begin + c) % s.group_size();
    Sum largest = -std::numeric_limits<Sum>::infinity();
    for (std::int64_t i = 0; i < plan.num_splits; ++i) largest = std::max(largest, lse[i * columns + c]);
    const bool empty = largest == -std::numeric_limits<Sum>::infinity();
    Sum total = 0;
    Sum weight[kWantedTasks];
    for (std::int64_t i = 0; i < plan.num_splits; ++i)
      total += weight[i] = empty ? 0 : std::exp(lse[i * columns + c] - largest);
    static_cast<Sum*>(p.lse)[head * p.lse_head_stride + row] = empty ? largest : largest + std::log(total);
    visit_dtype(p.out.dtype, [&]<class T>() {
      T* dst = p.out.at<T>(row, head);
      for (std::int64_t j = 0; j < s.value_width; ++j) {
        Sum x = 0;
        for (std::int64_t i = 0; i < plan.num_splits; ++i) x += weight[i] * out[(i * columns + c) * s.value_width + j];
        dst[j] = static_cast<T>(empty ? 0 : x / total);
      }
    });
  }
}

/// Zeroes a gradient at the rows of the keys.
template <class T>
void clear_rows(const AttentionProblem& p, const HeadRows& x, std::int64_t head) {
  for (std::int64_t i = 0; i < p.keys.size; ++i) {
    T* row = x.at<T>(p.keys.row[i], head);
    std::fill(row, row + x.width, T{});
  }
}

/// Writes the sum of `num_slots` slots, in order, to a gradient, or adds it.
template <class Sum>
void write_sums(const AttentionProblem& p, const HeadRows& x, std::int64_t head, const Tensor& sums,
                std::int64_t first_slot, std::int64_t num_slots, bool add) {
  const std::int64_t slot_size = sums.size(1) * sums.size(2);
  visit_dtype(x.dtype, [&]<class T>() {
    for (std::int64_t i = 0; i < p.keys.size; ++i) {
      T* dst = x.at<T>(p.keys.row[i], head);
      const Sum* src = sums.data<Sum>() + first_slot * slot_size + i * x.width;
      for (std::int64_t j = 0; j < x.width; ++j) {
        Sum total = src[j];
        for (std::int64_t slot = 1; slot < num_slots; ++slot) total += src[slot * slot_size + j];
        dst[j] = static_cast<T>(add ? static_cast<Sum>(dst[j]) + total : total);
      }
    }
  });
}

/// The rows into which one task sums one gradient, cleared unless they go on from before.
template <class Sum>
GradientRows open_sums(const AttentionProblem& p, const HeadRows& x, std::int64_t head, const Tensor& sums,
                       std::int64_t slot, bool go_on) {
  if (x.width == 0) return {};
  if (!sums.defined()) {
    if (!go_on && !p.accumulate) clear_rows<Sum>(p, x, head);
    return {x.at<Sum>(0, head), x.row_stride, true};
  }
  const std::int64_t size = sums.size(1) * sums.size(2);
  Sum* data = sums.data<Sum>() + slot * size;
  if (!go_on) std::fill(data, data + size, Sum{});
  return {data, x.width, false};
}

/// The sums of one chunk of a head: the gradient itself for the first one where that is float32, else a slot.
template <class Sum>
GradientRows open_chunk(const AttentionProblem& p, const HeadRows& x, std::int64_t head, const BackwardPlan& plan,
                        std::int64_t chunk, const Tensor& sums, bool first_in_place) {
  if (first_in_place && chunk == 0) return open_sums<Sum>(p, x, head, {}, 0, false);
  const std::int64_t slots_a_head = plan.num_chunks - (first_in_place ? 1 : 0);
  return open_sums<Sum>(p, x, head, sums, head * slots_a_head + chunk - (first_in_place ? 1 : 0), false);
}

/// Adds up the chunks of a head, in order.
template <class Sum>
void join_chunks(const AttentionProblem& p, const HeadRows& x, std::int64_t head, const BackwardPlan& plan,
                 const Tensor& sums, bool first_in_place) {
  const std::int64_t slots_a_head = plan.num_chunks - (first_in_place ? 1 : 0);
  write_sums<Sum>(p, x, head, sums, head * slots_a_head, slots_a_head, first_in_place || p.accumulate);
}

template <class Sum>
void run_backward_task(const AttentionProblem& p, const AttentionBlockKernels& kernels, const BackwardPlan& plan,
                       std::int64_t task, int thread) {
  const std::int64_t group = task / plan.num_chunks;
  const std::int64_t chunk = task % plan.num_chunks;
  const std::int64_t first_head = group * p.shape.num_kv_heads / plan.num_groups;
  const std::int64_t last_head = (group + 1) * p.shape.num_kv_heads / plan.num_groups;
  char* scratch = thread_scratch(plan.scratch_bytes);
  for (std::int64_t head = first_head; head < last_head; ++head) {
    BackwardTask block{.kv_head = head};
    const bool chunked = plan.num_chunks > 1;
    const std::int64_t slot = plan.slot_per_task ? task : thread;
    block.dk[0] = chunked ? open_chunk<Sum>(p, p.dk[0], head, plan, chunk, plan.dk_sums[0], plan.dk_first_in_place)
                          : open_sums<Sum>(p, p.dk[0], head, plan.dk_sums[0], slot, false);
    block.dk[1] = open_sums<Sum>(p, p.dk[1], 0, plan.dk_sums[1], task, head > first_head);
    block.dv = chunked ? open_chunk<Sum>(p, p.dv, head, plan, chunk, plan.dv_sums, plan.dv_first_in_place)
                       : open_sums<Sum>(p, p.dv, head, plan.dv_sums, slot, false);
    for (std::int64_t i = chunk; i < plan.num_blocks; i += plan.num_chunks) {
      block.column_begin = i * plan.block_columns;
      block.num_columns = std::min(plan.block_columns, p.shape.num_columns() - block.column_begin);
      kernels.backward(p, block, scratch);
    }
    if (chunked) continue;
    if (plan.dk_sums[0].defined()) write_sums<Sum>(p, p.dk[0], head, plan.dk_sums[0], slot, 1, p.accumulate);
    if (plan.dv_sums.defined()) write_sums<Sum>(p, p.dv, head, plan.dv_sums, slot, 1, p.accumulate);
  }
}

}  // namespace

void run_attention_forward(RankContext& ctx, const AttentionProblem& problem, const AttentionBlockKernels& kernels,
                           const ForwardPlan& plan) {
  const AttentionShape& s = problem.shape;
  const std::int64_t tasks = s.num_kv_heads * plan.num_blocks;
  ctx.threads().parallel_for(tasks * plan.num_splits, [&](std::int64_t i, int) {
    const std::int64_t split = i % plan.num_splits;
    const std::int64_t task = i / plan.num_splits;
    // The last columns see the most keys: first, so that threads end together.
    const std::int64_t block = plan.num_blocks - 1 - task % plan.num_blocks;
    ForwardTask forward{.kv_head = task / plan.num_blocks, .column_begin = block * plan.block_columns};
    forward.num_columns = std::min(plan.block_columns, s.num_columns() - forward.column_begin);
    forward.key_begin = split * plan.split_keys;
    forward.key_end = std::min(s.num_keys, forward.key_begin + plan.split_keys);
    if (plan.num_splits > 1) {
      visit_sums(s, [&]<class Sum>(Sum) {
        const std::int64_t place = (forward.kv_head * plan.num_blocks + block) * plan.num_splits + split;
        const std::int64_t columns = plan.partial_lse.size(2);
        forward.partial_out = plan.partial_out.data<Sum>() + place * columns * s.value_width;
        forward.partial_lse = plan.partial_lse.data<Sum>() + place * columns;
      });
    }
    kernels.forward(problem, forward, thread_scratch(plan.scratch_bytes));
  });
  if (plan.num_splits == 1) return;
  ctx.threads().parallel_for(tasks, [&](std::int64_t task, int) {
    visit_sums(s, [&]<class Sum>(Sum) { merge_splits<Sum>(problem, plan, task); });
  });
}

void run_attention_backward(RankContext& ctx, const AttentionProblem& problem, const AttentionBlockKernels& kernels,
                            const BackwardPlan& plan) {
  const std::int64_t tasks = plan.num_groups * plan.num_chunks;
  visit_sums(problem.shape, [&]<class Sum>(Sum) {
    ctx.threads().parallel_for(
        tasks, [&](std::int64_t task, int thread) { run_backward_task<Sum>(problem, kernels, plan, task, thread); });
    if (plan.num_chunks > 1) {
      ctx.threads().parallel_for(problem.shape.num_kv_heads, [&](std::int64_t head, int) {
        join_chunks<Sum>(problem, problem.dk[0], head, plan, plan.dk_sums[0], plan.dk_first_in_place);
        join_chunks<Sum>(problem, problem.dv, head, plan, plan.dv_sums, plan.dv_first_in_place);
      });
    }
    if (plan.dk_sums[1].defined())
      write_sums<Sum>(problem, problem.dk[1], 0, plan.dk_sums[1], 0, tasks, problem.accumulate);
  });
}

}  // namespace isomer
