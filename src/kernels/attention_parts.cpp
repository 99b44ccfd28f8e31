#include "kernels/attention_parts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cost/op_cost.h"
#include "kernels/dispatch.h"

namespace isomer {

namespace {

/// The weight of one part among all: 0 where it is empty.
template <class Sum>
Sum weight_of_part(const Tensor& lses, std::int64_t part, std::int64_t head, std::int64_t row) {
  const auto lse = [&](std::int64_t i) {
    return lses.data<Sum>()[i * lses.stride(0) + head * lses.stride(1) + row * lses.stride(2)];
  };
  constexpr Sum kEmpty = -std::numeric_limits<Sum>::infinity();
  if (lse(part) == kEmpty) return 0;
  Sum largest = kEmpty, total = 0;
  for (std::int64_t i = 0; i < lses.size(0); ++i) largest = std::max(largest, lse(i));
  for (std::int64_t i = 0; i < lses.size(0); ++i) total += std::exp(lse(i) - largest);
  return std::exp(lse(part) - largest) / total;
}

template <class Sum>
void weigh_row(const Tensor& out, const Tensor& lses, std::int64_t part, std::int64_t row) {
  visit_dtype(out.dtype(), [&]<class T>() {
    for (std::int64_t head = 0; head < out.size(1); ++head) {
      const Sum weight = weight_of_part<Sum>(lses, part, head, row);
      T* at = out.data<T>() + row * out.stride(0) + head * out.stride(1);
      for (std::int64_t i = 0; i < out.size(2); ++i) {
        at[i] = weight == 0 ? T{} : static_cast<T>(weight * static_cast<Sum>(at[i]));
      }
    }
  });
}

}  // namespace

void weigh_partial_attention(RankContext& ctx, const Tensor& out, const Tensor& lses, std::int64_t part) {
  const bool wide = out.dtype() == DType::f64;
  ISOMER_CHECK(out.dim() == 3 && lses.dim() == 3 && lses.size(1) == out.size(1) && lses.size(2) == out.size(0) &&
                   part >= 0 && part < lses.size(0) && (out.size(2) <= 1 || out.stride(2) == 1) &&
                   lses.dtype() == (wide ? DType::f64 : DType::f32),
               "weigh_partial_attention: part {}, out {}, lses {} {}", part, to_string(out.shape()),
               to_string(lses.shape()), name_of(lses.dtype()));
  const OpCost cost = elementwise_cost(out.numel(), 1, 1, 1, out.dtype());
  run_kernel(ctx, "weigh_partial_attention", cost, [&] {
    ctx.threads().parallel_for(out.size(0), [&](std::int64_t row, int) {
      if (wide) {
        weigh_row<double>(out, lses, part, row);
      } else {
        weigh_row<float>(out, lses, part, row);
      }
    });
  });
}

void scale_heads(RankContext& ctx, std::string_view name, const Tensor& x, std::span<const double> factors) {
  ISOMER_CHECK(
      x.dim() == 3 && static_cast<std::int64_t>(factors.size()) == x.size(1) && (x.size(2) <= 1 || x.stride(2) == 1),
      "{}: {} factors for {}", name, factors.size(), to_string(x.shape()));
  run_kernel(ctx, name, elementwise_cost(x.numel(), 1, 1, 1, x.dtype()), [&] {
    visit_dtype(x.dtype(), [&]<class T>() {
      ctx.threads().parallel_for(x.size(0), [&](std::int64_t row, int) {
        for (std::int64_t head = 0; head < x.size(1); ++head) {
          T* at = x.data<T>() + row * x.stride(0) + head * x.stride(1);
          const double factor = factors[static_cast<std::size_t>(head)];
          for (std::int64_t i = 0; i < x.size(2); ++i) {
            at[i] = static_cast<T>(static_cast<double>(at[i]) * factor);
          }
        }
      });
    });
  });
}

}  // namespace isomer
