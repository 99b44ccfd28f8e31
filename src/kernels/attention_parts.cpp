#include "kernels/attention_parts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

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

template <class Sum, class T>
Sum packed_lse(const T* row, std::int64_t width) {
  Sum lse;
  std::memcpy(&lse, row + width, sizeof lse);
  return lse;
}

/// One row of one head: parts at `part`, `stride` apart, into out and the scratch `sum`, both [width].
template <class Sum, class T>
void merge_packed_row(const T* part, std::int64_t num_parts, std::int64_t stride, std::int64_t width, Sum* sum,
                      T* out) {
  constexpr Sum kEmpty = -std::numeric_limits<Sum>::infinity();
  Sum largest = kEmpty, total = 0;
  for (std::int64_t j = 0; j < num_parts; ++j) largest = std::max(largest, packed_lse<Sum>(part + j * stride, width));
  std::fill_n(sum, width, Sum{});
  for (std::int64_t j = 0; j < num_parts; ++j) {
    const T* row = part + j * stride;
    const Sum lse = packed_lse<Sum>(row, width);
    if (lse == kEmpty) continue;
    const Sum weight = std::exp(lse - largest);
    total += weight;
    for (std::int64_t i = 0; i < width; ++i) sum[i] += weight * static_cast<Sum>(row[i]);
  }
  for (std::int64_t i = 0; i < width; ++i) out[i] = static_cast<T>(total == 0 ? Sum{} : sum[i] / total);
}

template <class Sum, class T>
void merge_packed_rows(RankContext& ctx, const Tensor& parts, const Tensor& out) {
  ctx.threads().parallel_for(out.size(0), [&](std::int64_t row, int) {
    std::vector<Sum> sum(static_cast<std::size_t>(out.size(2)));
    for (std::int64_t head = 0; head < out.size(1); ++head) {
      merge_packed_row(parts.data<T>() + row * parts.stride(1) + head * parts.stride(2), parts.size(0), parts.stride(0),
                       out.size(2), sum.data(), out.data<T>() + row * out.stride(0) + head * out.stride(1));
    }
  });
}

/// Calls body.operator()<T, Sum>() with the element's type and that of its statistics.
template <class Fn>
void visit_with_statistics(DType dtype, Fn&& body) {
  switch (dtype) {
    case DType::f32: return body.template operator()<float, float>();
    case DType::bf16: return body.template operator()<bf16, float>();
    case DType::f64: return body.template operator()<double, double>();
  }
}

}  // namespace

std::int64_t packed_lse_elements(DType dtype) { return dtype == DType::bf16 ? 2 : 1; }

void pack_partial_attention(RankContext& ctx, const Tensor& out, const Tensor& lse, const Tensor& packed) {
  const std::int64_t width = out.size(2);
  ISOMER_CHECK(packed.shape() == Shape({out.size(0), out.size(1), width + packed_lse_elements(out.dtype())}) &&
                   packed.dtype() == out.dtype() && lse.shape() == Shape({out.size(1), out.size(0)}) &&
                   lse.dtype() == (out.dtype() == DType::f64 ? DType::f64 : DType::f32),
               "pack_partial_attention: out {}, lse {} {}, packed {}", to_string(out.shape()), to_string(lse.shape()),
               name_of(lse.dtype()), to_string(packed.shape()));
  run_kernel(ctx, "pack_partial_attention", elementwise_cost(out.numel(), 1, 1, 1, out.dtype()), [&] {
    visit_with_statistics(out.dtype(), [&]<class T, class Sum>() {
      for (std::int64_t row = 0; row < out.size(0); ++row) {
        for (std::int64_t head = 0; head < out.size(1); ++head) {
          T* to = packed.data<T>() + row * packed.stride(0) + head * packed.stride(1);
          std::copy_n(out.data<T>() + row * out.stride(0) + head * out.stride(1), width, to);
          std::memcpy(static_cast<void*>(to + width), lse.data<Sum>() + head * lse.stride(0) + row * lse.stride(1),
                      sizeof(Sum));
        }
      }
    });
  });
}

void merge_packed_attention(RankContext& ctx, const Tensor& parts, const Tensor& out) {
  ISOMER_CHECK(parts.dim() == 4 && parts.dtype() == out.dtype() && parts.size(1) == out.size(0) &&
                   parts.size(2) == out.size(1) && parts.size(3) == out.size(2) + packed_lse_elements(out.dtype()),
               "merge_packed_attention: parts {}, out {}", to_string(parts.shape()), to_string(out.shape()));
  const OpCost cost = elementwise_cost(parts.numel(), 2, 1, 0, out.dtype());
  run_kernel(ctx, "merge_packed_attention", cost, [&] {
    visit_with_statistics(out.dtype(), [&]<class T, class Sum>() { merge_packed_rows<Sum, T>(ctx, parts, out); });
  });
}

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
