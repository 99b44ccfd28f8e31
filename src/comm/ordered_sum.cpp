#include "comm/ordered_sum.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cost/op_cost.h"
#include "kernels/dispatch.h"

namespace isomer {

namespace {

constexpr std::int64_t kChunk = 4096;        // elements whose accumulators stay in the first-level cache
constexpr std::int64_t kTask = 16 * kChunk;  // elements of one task

template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
void set(Accumulator<T>* __restrict sum, const T* __restrict value, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) sum[i] = static_cast<Accumulator<T>>(value[i]);
}

template <class T>
void add(Accumulator<T>* __restrict sum, const T* __restrict value, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) sum[i] += static_cast<Accumulator<T>>(value[i]);
}

template <class T>
void round_to(T* __restrict out, const Accumulator<T>* __restrict sum, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(sum[i]);
}

template <class T>
void sum_chunk(const std::vector<Block>& sources, const Block& out, std::int64_t begin, std::int64_t end) {
  constexpr auto kWidth = static_cast<std::int64_t>(sizeof(T));
  alignas(64) Accumulator<T> sum[kChunk];
  const auto for_pieces = [&](const Block& block, auto&& body) {
    std::int64_t done = 0;
    for_each_piece(block, begin * kWidth, end * kWidth, [&](std::byte* piece, std::int64_t bytes) {
      body(sum + done, reinterpret_cast<T*>(piece), bytes / kWidth);
      done += bytes / kWidth;
    });
  };
  for (std::size_t source = 0; source < sources.size(); ++source) {
    for_pieces(sources[source], [&](Accumulator<T>* to, const T* value, std::int64_t count) {
      source == 0 ? set<T>(to, value, count) : add<T>(to, value, count);
    });
  }
  for_pieces(out, [](Accumulator<T>* from, T* to, std::int64_t count) { round_to<T>(to, from, count); });
}

}  // namespace

void ordered_sum(RankContext& ctx, DType dtype, const std::vector<Block>& sources, const Block& out) {
  const std::int64_t count = out.bytes() / size_of(dtype);
  const auto num_sources = static_cast<double>(sources.size());
  run_kernel(ctx, "ordered_sum", elementwise_cost(count, num_sources - 1, num_sources, 1, dtype), [&] {
    ctx.threads().parallel_for((count + kTask - 1) / kTask, [&](std::int64_t task, int) {
      const std::int64_t task_end = std::min(count, (task + 1) * kTask);
      for (std::int64_t begin = task * kTask; begin < task_end; begin += kChunk) {
        const std::int64_t end = std::min(task_end, begin + kChunk);
        visit_dtype(dtype, [&]<class T>() { sum_chunk<T>(sources, out, begin, end); });
      }
    });
  });
}

}  // namespace isomer
