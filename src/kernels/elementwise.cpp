#include "kernels/elementwise.h"

#include <algorithm>
#include <cstring>

#include "cost/op_cost.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/dispatch.h"
#include "kernels/row_tasks.h"

namespace isomer {

namespace {

using cpu::row_kernels;
using cpu::Statistic;

constexpr std::int64_t kColumnsPerTask = 512;

/// body(begin, count) for blocks of columns; each block is summed over all rows in order by one thread.
template <class Body>
void for_column_blocks(RankContext& ctx, std::int64_t width, Body&& body) {
  ctx.threads().parallel_for((width + kColumnsPerTask - 1) / kColumnsPerTask, [&](std::int64_t task, int) {
    const std::int64_t begin = task * kColumnsPerTask;
    body(begin, std::min(kColumnsPerTask, width - begin));
  });
}

/// Views of 1 to 3 axes as [outer, middle, inner].
Tensor as_three_axes(const Tensor& t) {
  if (t.dim() == 3) return t;
  if (t.dim() == 2) return t.unflatten(0, {1, t.size(0)});
  ISOMER_CHECK(t.dim() == 1, "1 to 3 axes expected, shape {}", to_string(t.shape()));
  return t.unflatten(0, {1, 1, t.size(0)});
}

template <class Row>
void for_inner_rows(RankContext& ctx, const Tensor& like, Row&& row) {
  const std::int64_t middle = like.size(1);
  for_rows(ctx, like.size(0) * middle, [&](std::int64_t index) { row(index / middle, index % middle); });
}

template <class T>
T* inner_row(const Tensor& t, std::int64_t outer, std::int64_t middle) {
  return t.data<T>() + outer * t.stride(0) + middle * t.stride(1);
}

}  // namespace

void rms_norm_forward(RankContext& ctx, std::string_view name, const Tensor& x, const Tensor& weight, double eps,
                      const Tensor& y, const Tensor& rstd) {
  const std::int64_t num_rows = x.size(0), width = x.size(1);
  check_rows(name, x, num_rows, width);
  check_rows(name, y, num_rows, width);
  ISOMER_CHECK(rstd.numel() == num_rows && rstd.dtype() == statistic_dtype(x.dtype()), "{}: rstd", name);
  run_kernel(ctx, name, elementwise_cost(x.numel(), 4, 1, 1, x.dtype()), [&] {
    visit_dtype(x.dtype(), [&]<class T>() {
      using S = Statistic<T>;
      const T* w = weight ? weight.data<T>() : nullptr;
      for_rows(ctx, num_rows, [&](std::int64_t row) {
        row_kernels<T>().rms_norm_forward(row_of<T>(x, row), w, width, static_cast<S>(eps), row_of<T>(y, row),
                                          rstd.data<S>() + row);
      });
    });
  });
}

namespace {

template <class T>
void rms_norm_input_gradient(RankContext& ctx, const RmsNormBackward& a, bool wide) {
  using S = Statistic<T>;
  const T* w = a.weight ? a.weight.data<T>() : nullptr;
  for_rows(ctx, a.x.size(0), [&](std::int64_t row) {
    const T* residual = a.residual ? row_of<T>(a.residual, row) : nullptr;
    const S rstd = a.rstd.data<S>()[row];
    if (wide) {
      row_kernels<T>().rms_norm_backward_wide(row_of<T>(a.x, row), rstd, w, row_of<S>(a.dy, row), residual, a.x.size(1),
                                              row_of<T>(a.dx, row));
    } else {
      row_kernels<T>().rms_norm_backward(row_of<T>(a.x, row), rstd, w, row_of<T>(a.dy, row), residual, a.x.size(1),
                                         row_of<T>(a.dx, row));
    }
  });
}

template <class T>
void rms_norm_weight_gradient(RankContext& ctx, const RmsNormBackward& a, bool wide) {
  using S = Statistic<T>;
  for_column_blocks(ctx, a.x.size(1), [&](std::int64_t begin, std::int64_t count) {
    const T* x = a.x.data<T>() + begin;
    S* out = a.dweight.data<S>() + begin;
    if (wide) {
      row_kernels<T>().rms_norm_weight_gradient_wide(x, a.x.stride(0), a.rstd.data<S>(), a.dy.data<S>() + begin,
                                                     a.dy.stride(0), a.x.size(0), count, out);
    } else {
      row_kernels<T>().rms_norm_weight_gradient(x, a.x.stride(0), a.rstd.data<S>(), a.dy.data<T>() + begin,
                                                a.dy.stride(0), a.x.size(0), count, out);
    }
  });
}

}  // namespace

void rms_norm_backward(RankContext& ctx, std::string_view name, const RmsNormBackward& a) {
  const std::int64_t num_rows = a.x.size(0), width = a.x.size(1);
  for (const Tensor* t : {&a.x, &a.dy, &a.dx}) check_rows(name, *t, num_rows, width);
  if (a.residual) check_rows(name, a.residual, num_rows, width);
  const bool wide = a.dy.dtype() != a.x.dtype();
  ISOMER_CHECK(!wide || a.dy.dtype() == statistic_dtype(a.x.dtype()), "{}: dy is {}", name, name_of(a.dy.dtype()));
  run_kernel(ctx, name, elementwise_cost(a.x.numel(), 10, 3, 1, a.x.dtype()), [&] {
    visit_dtype(a.x.dtype(), [&]<class T>() {
      // The weight gradient first: dx may take the place of dy.
      if (a.dweight) rms_norm_weight_gradient<T>(ctx, a, wide);
      rms_norm_input_gradient<T>(ctx, a, wide);
    });
  });
}

void apply_rope(RankContext& ctx, std::string_view name, const Tensor& x, const RopeRows& rope,
                RopeDirection direction) {
  ISOMER_CHECK(x.dim() == 3 && x.size(2) % 2 == 0 && (x.size(2) == 0 || x.stride(2) == 1), "{}: shape {}", name,
               to_string(x.shape()));
  if (x.size(2) == 0) return;
  const std::int64_t pairs = x.size(2) / 2;
  ISOMER_CHECK(rope.cos.size(1) == pairs && rope.cos.size(0) * rope.rows_per_position >= x.size(0),
               "{}: {} rows of {} pairs, table {} × {} rows a position", name, x.size(0), pairs,
               to_string(rope.cos.shape()), rope.rows_per_position);
  run_kernel(ctx, name, elementwise_cost(x.numel(), 3, 1, 1, x.dtype()), [&] {
    visit_dtype(x.dtype(), [&]<class T>() {
      using S = Statistic<T>;
      const S sign = direction == RopeDirection::forward ? S(1) : S(-1);
      for_rows(ctx, x.size(0), [&](std::int64_t row) {
        const std::int64_t position = row / rope.rows_per_position;
        const S* cos = rope.cos.data<S>() + position * pairs;
        const S* sin = rope.sin.data<S>() + position * pairs;
        for (std::int64_t head = 0; head < x.size(1); ++head) {
          row_kernels<T>().rope(inner_row<T>(x, row, head), cos, sin, pairs, rope.interleave, sign);
        }
      });
    });
  });
}

void copy(RankContext& ctx, std::string_view name, const Tensor& from, const Tensor& to) {
  ISOMER_CHECK(from.shape() == to.shape(), "{}: {} to {}", name, to_string(from.shape()), to_string(to.shape()));
  if (from.numel() == 0) return;  // no pointer to give to memcpy
  const Tensor source = as_three_axes(from), target = as_three_axes(to);
  const std::int64_t width = source.size(2);
  ISOMER_CHECK(width <= 1 || (source.stride(2) == 1 && target.stride(2) == 1), "{}: inner strides", name);
  const OpCost cost{0, static_cast<double>(from.nbytes()), static_cast<double>(to.nbytes())};
  run_kernel(ctx, name, cost, [&] {
    if (source.dtype() == target.dtype()) {
      visit_dtype(source.dtype(), [&]<class T>() {
        for_inner_rows(ctx, source, [&](std::int64_t i, std::int64_t j) {
          std::memcpy(inner_row<T>(target, i, j), inner_row<T>(source, i, j),
                      static_cast<std::size_t>(width) * sizeof(T));
        });
      });
    } else if (source.dtype() == DType::bf16 && target.dtype() == DType::f32) {
      for_inner_rows(ctx, source, [&](std::int64_t i, std::int64_t j) {
        row_kernels<bf16>().widen(inner_row<bf16>(source, i, j), width, inner_row<float>(target, i, j));
      });
    } else {
      ISOMER_CHECK(source.dtype() == DType::f32 && target.dtype() == DType::bf16, "{}: {} to {}", name,
                   name_of(source.dtype()), name_of(target.dtype()));
      for_inner_rows(ctx, source, [&](std::int64_t i, std::int64_t j) {
        row_kernels<bf16>().narrow(inner_row<float>(source, i, j), width, inner_row<bf16>(target, i, j));
      });
    }
  });
}

void add(RankContext& ctx, std::string_view name, const Tensor& a, const Tensor& b, const Tensor& out) {
  ISOMER_CHECK(a.shape() == b.shape() && a.shape() == out.shape() && a.dtype() == out.dtype(), "{}: {} + {}", name,
               to_string(a.shape()), to_string(b.shape()));
  const Tensor left = as_three_axes(a), right = as_three_axes(b), target = as_three_axes(out);
  const std::int64_t width = left.size(2);
  run_kernel(ctx, name, elementwise_cost(a.numel(), 1, 2, 1, a.dtype()), [&] {
    visit_dtype(b.dtype(), [&]<class T>() {
      using S = Statistic<T>;
      for_inner_rows(ctx, left, [&](std::int64_t i, std::int64_t j) {
        if (a.dtype() == b.dtype()) {
          row_kernels<T>().add(inner_row<T>(left, i, j), inner_row<T>(right, i, j), width, inner_row<T>(target, i, j));
        } else {
          row_kernels<T>().add_wide(inner_row<S>(left, i, j), inner_row<T>(right, i, j), width,
                                    inner_row<S>(target, i, j));
        }
      });
    });
  });
}

void scaled_sum(RankContext& ctx, std::string_view name, const Tensor& a, const Tensor& b, double scale,
                const Tensor& out) {
  ISOMER_CHECK(a.shape() == out.shape() && a.dtype() == out.dtype() && (!b || b.shape() == a.shape()), "{}: {} to {}",
               name, to_string(a.shape()), to_string(out.shape()));
  const Tensor left = as_three_axes(a), target = as_three_axes(out), right = b ? as_three_axes(b) : Tensor();
  run_kernel(ctx, name, elementwise_cost(a.numel(), 2, b ? 2 : 1, 1, a.dtype()), [&] {
    visit_dtype(a.dtype(), [&]<class T>() {
      for_inner_rows(ctx, left, [&](std::int64_t i, std::int64_t j) {
        const T* addend = right ? inner_row<T>(right, i, j) : nullptr;
        row_kernels<T>().scaled_sum(inner_row<T>(left, i, j), addend, static_cast<Statistic<T>>(scale), left.size(2),
                                    inner_row<T>(target, i, j));
      });
    });
  });
}

void sum_heads(RankContext& ctx, std::string_view name, const Tensor& from, const Tensor& to) {
  ISOMER_CHECK(from.dim() == 3 && to.dtype() == statistic_dtype(from.dtype()), "{}: {} of {} to {}", name,
               to_string(from.shape()), name_of(from.dtype()), name_of(to.dtype()));
  check_rows(name, to, from.size(0), from.size(2));
  const OpCost cost{static_cast<double>(from.numel()), static_cast<double>(from.nbytes()),
                    static_cast<double>(to.nbytes())};
  run_kernel(ctx, name, cost, [&] {
    visit_dtype(from.dtype(), [&]<class T>() {
      using S = Statistic<T>;
      for_rows(ctx, from.size(0), [&](std::int64_t row) {
        S* out = row_of<S>(to, row);
        std::fill_n(out, from.size(2), S(0));
        for (std::int64_t head = 0; head < from.size(1); ++head) {
          row_kernels<T>().add_wide(out, inner_row<T>(from, row, head), from.size(2), out);
        }
      });
    });
  });
}

void add_bias(RankContext& ctx, std::string_view name, const Tensor& bias, const Tensor& x) {
  check_rows(name, x, x.size(0), bias.numel());
  run_kernel(ctx, name, elementwise_cost(x.numel(), 1, 1, 1, x.dtype()), [&] {
    visit_dtype(x.dtype(), [&]<class T>() {
      for_rows(ctx, x.size(0), [&](std::int64_t row) {
        row_kernels<T>().add(row_of<T>(x, row), bias.data<T>(), x.size(1), row_of<T>(x, row));
      });
    });
  });
}

void sum_rows(RankContext& ctx, std::string_view name, const Tensor& from, const Tensor& to) {
  check_rows(name, from, from.size(0), to.numel());
  ISOMER_CHECK(to.dtype() == statistic_dtype(from.dtype()), "{}: result is {}", name, name_of(to.dtype()));
  run_kernel(ctx, name, elementwise_cost(from.numel(), 1, 1, 0, from.dtype()), [&] {
    visit_dtype(from.dtype(), [&]<class T>() {
      using S = Statistic<T>;
      for_column_blocks(ctx, from.size(1), [&](std::int64_t begin, std::int64_t count) {
        S* out = to.data<S>() + begin;
        std::fill_n(out, count, S(0));
        for (std::int64_t row = 0; row < from.size(0); ++row) {
          row_kernels<T>().add_wide(out, row_of<T>(from, row) + begin, count, out);
        }
      });
    });
  });
}

void softmax_forward(RankContext& ctx, std::string_view name, const Tensor& scores, double scale, bool causal,
                     std::int64_t diagonal, const Tensor& out) {
  ISOMER_CHECK(scores.dim() == 3 && scores.shape() == out.shape(), "{}: {} to {}", name, to_string(scores.shape()),
               to_string(out.shape()));
  const std::int64_t num_keys = scores.size(2);
  run_kernel(ctx, name, elementwise_cost(scores.numel(), 8, 1, 1, scores.dtype()), [&] {
    visit_dtype(scores.dtype(), [&]<class T>() {
      using S = Statistic<T>;
      for_inner_rows(ctx, scores, [&](std::int64_t head, std::int64_t query) {
        const std::int64_t valid = causal ? std::clamp<std::int64_t>(query + diagonal + 1, 0, num_keys) : num_keys;
        row_kernels<T>().softmax(inner_row<T>(scores, head, query), static_cast<S>(scale), valid, num_keys,
                                 inner_row<T>(out, head, query));
      });
    });
  });
}

void softmax_backward(RankContext& ctx, std::string_view name, const Tensor& p, const Tensor& dp, double scale,
                      const Tensor& out) {
  ISOMER_CHECK(p.dim() == 3 && p.shape() == dp.shape() && p.shape() == out.shape(), "{}: {} and {}", name,
               to_string(p.shape()), to_string(dp.shape()));
  run_kernel(ctx, name, elementwise_cost(p.numel(), 5, 2, 1, p.dtype()), [&] {
    visit_dtype(p.dtype(), [&]<class T>() {
      using S = Statistic<T>;
      for_inner_rows(ctx, p, [&](std::int64_t head, std::int64_t query) {
        row_kernels<T>().softmax_backward(inner_row<T>(p, head, query), inner_row<T>(dp, head, query),
                                          static_cast<S>(scale), p.size(2), inner_row<T>(out, head, query));
      });
    });
  });
}

}  // namespace isomer
