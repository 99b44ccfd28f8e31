// How row operations are dealt to a rank's threads: tasks of a fixed number of rows, so that results don't depend on
// how many threads there are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "core/rank_context.h"
#include "core/tensor.h"

namespace isomer {

inline constexpr std::int64_t kRowsPerTask = 64;

/// body(row) for all rows, `rows_per_task` rows a task.
template <class Body>
void for_rows(RankContext& ctx, std::int64_t num_rows, Body&& body, std::int64_t rows_per_task = kRowsPerTask) {
  ctx.threads().parallel_for((num_rows + rows_per_task - 1) / rows_per_task, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(num_rows, (task + 1) * rows_per_task);
    for (std::int64_t row = task * rows_per_task; row < end; ++row) body(row);
  });
}

/// Holds t against [num_rows, width] with unit inner stride.
inline void check_rows(std::string_view name, const Tensor& t, std::int64_t num_rows, std::int64_t width) {
  ISOMER_CHECK(t.dim() == 2 && t.size(0) == num_rows && t.size(1) == width && (width <= 1 || t.stride(1) == 1),
               "{}: shape {} strides {}, expected [{}, {}] with unit inner stride", name, to_string(t.shape()),
               to_string(t.strides()), num_rows, width);
}

template <class T>
T* row_of(const Tensor& t, std::int64_t row) {
  return t.data<T>() + row * t.stride(0);
}

}  // namespace isomer
