#include <algorithm>
#include <cmath>
#include <limits>

#include "cost/op_cost.h"
#include "kernels/attention.h"
#include "kernels/dispatch.h"

namespace isomer {

namespace {

constexpr std::int64_t kRowsPerTask = 64;

void check_pair(std::string_view name, const Tensor& out, const Tensor& lse, const Shape& shape, DType dtype) {
  if (!out.defined() || out.dim() != 3 || out.shape() != shape)
    invalid_argument("merge_attention: {}out must have shape [rows, heads, width] = {}, has {}", name, to_string(shape),
                     to_string(out.shape()));
  if (!lse.defined() || lse.shape() != Shape{shape[1], shape[0]})
    invalid_argument("merge_attention: {}lse must have shape {}, has {}", name, to_string({shape[1], shape[0]}),
                     to_string(lse.shape()));
  if (lse.dtype() != dtype)
    invalid_argument("merge_attention: {}lse is {}, must be {}", name, name_of(lse.dtype()), name_of(dtype));
  if (out.size(2) > 1 && out.stride(2) != 1)
    invalid_argument("merge_attention: the innermost stride of {}out is {}, must be 1", name, out.stride(2));
}

/// One row of one head. A part with weight 0 is not read, so that what stands under lse = −∞ never matters.
template <class Sum, class To, class From>
void merge_row(To* out, const From* other, std::int64_t width, Sum& lse, Sum other_lse) {
  constexpr Sum kEmpty = -std::numeric_limits<Sum>::infinity();
  if (other_lse == kEmpty) {
    if (lse == kEmpty) std::fill_n(out, width, To{});
    return;
  }
  const Sum largest = std::max(lse, other_lse);
  const Sum mine = lse == kEmpty ? 0 : std::exp(lse - largest);
  const Sum theirs = std::exp(other_lse - largest);
  const Sum total = mine + theirs;
  for (std::int64_t i = 0; i < width; ++i) {
    const Sum kept = lse == kEmpty ? 0 : mine / total * static_cast<Sum>(out[i]);
    out[i] = static_cast<To>(kept + theirs / total * static_cast<Sum>(other[i]));
  }
  lse = largest + std::log(total);
}

template <class Sum>
void merge_rows(const Tensor& out, const Tensor& lse, const Tensor& other_out, const Tensor& other_lse,
                std::int64_t begin, std::int64_t end) {
  visit_dtype(out.dtype(), [&]<class To>() {
    visit_dtype(other_out.dtype(), [&]<class From>() {
      for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t head = 0; head < out.size(1); ++head) {
          merge_row<Sum>(out.data<To>() + row * out.stride(0) + head * out.stride(1),
                         other_out.data<From>() + row * other_out.stride(0) + head * other_out.stride(1), out.size(2),
                         lse.data<Sum>()[head * lse.stride(0) + row * lse.stride(1)],
                         other_lse.data<Sum>()[head * other_lse.stride(0) + row * other_lse.stride(1)]);
        }
      }
    });
  });
}

}  // namespace

void merge_attention(RankContext& ctx, const Tensor& out, const Tensor& lse, const Tensor& other_out,
                     const Tensor& other_lse) {
  if (!out.defined()) invalid_argument("merge_attention: out is missing");
  const DType statistics = out.dtype() == DType::f64 ? DType::f64 : DType::f32;
  check_pair("", out, lse, out.shape(), statistics);
  check_pair("other_", other_out, other_lse, out.shape(), statistics);
  const OpCost cost = elementwise_cost(out.numel(), 4, 2, 1, out.dtype());
  run_kernel(ctx, "merge_attention", cost, [&] {
    const std::int64_t rows = out.size(0);
    ctx.threads().parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](std::int64_t task, int) {
      const std::int64_t begin = task * kRowsPerTask;
      const std::int64_t end = std::min(rows, begin + kRowsPerTask);
      if (statistics == DType::f64) {
        merge_rows<double>(out, lse, other_out, other_lse, begin, end);
      } else {
        merge_rows<float>(out, lse, other_out, other_lse, begin, end);
      }
    });
  });
}

}  // namespace isomer
