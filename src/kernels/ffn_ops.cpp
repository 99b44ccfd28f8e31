#include "kernels/ffn_ops.h"

#include "cost/op_cost.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"
#include "kernels/row_tasks.h"

namespace isomer {

namespace {

using cpu::row_kernels;
using cpu::Statistic;

/// Holds rows by token, rows by slot and weights by slot (undefined allowed) against one another.
void check_slots(std::string_view name, const ExpertRows& rows, const Tensor& by_token, const Tensor& by_row,
                 const Tensor& by_slot) {
  check_rows(name, by_token, rows.num_tokens, by_token.size(1));
  check_rows(name, by_row, rows.num_rows(), by_token.size(1));
  ISOMER_CHECK(by_token.dtype() == by_row.dtype(), "{}: {} by token, {} by expert", name, name_of(by_token.dtype()),
               name_of(by_row.dtype()));
  if (!by_slot) return;
  check_rows(name, by_slot, rows.num_tokens, rows.top_k);
  ISOMER_CHECK(by_slot.is_contiguous() && by_slot.dtype() == statistic_dtype(by_row.dtype()), "{}: slots are {}", name,
               name_of(by_slot.dtype()));
}

}  // namespace

void silu_mul(RankContext& ctx, std::string_view name, const Tensor& gate, const Tensor& up, const Tensor& out) {
  for (const Tensor* t : {&gate, &up, &out}) check_rows(name, *t, gate.size(0), gate.size(1));
  run_kernel(ctx, name, elementwise_cost(gate.numel(), 5, 2, 1, gate.dtype()), [&] {
    visit_dtype(gate.dtype(), [&]<class T>() {
      for_rows(ctx, gate.size(0), [&](std::int64_t row) {
        row_kernels<T>().silu_mul(row_of<T>(gate, row), row_of<T>(up, row), gate.size(1), row_of<T>(out, row));
      });
    });
  });
}

void silu_mul_backward(RankContext& ctx, std::string_view name, const Tensor& gate, const Tensor& up,
                       const Tensor& dout, const Tensor& dgate, const Tensor& dup) {
  for (const Tensor* t : {&gate, &up, &dout, &dgate, &dup}) check_rows(name, *t, gate.size(0), gate.size(1));
  run_kernel(ctx, name, elementwise_cost(gate.numel(), 11, 3, 2, gate.dtype()), [&] {
    visit_dtype(gate.dtype(), [&]<class T>() {
      for_rows(ctx, gate.size(0), [&](std::int64_t row) {
        row_kernels<T>().silu_mul_backward(row_of<T>(gate, row), row_of<T>(up, row), row_of<T>(dout, row), gate.size(1),
                                           row_of<T>(dgate, row), row_of<T>(dup, row));
      });
    });
  });
}

ExpertRows sort_by_expert(std::span<const std::int32_t> experts, std::int64_t num_tokens, std::int64_t top_k,
                          std::int64_t num_experts) {
  ISOMER_CHECK(static_cast<std::int64_t>(experts.size()) == num_tokens * top_k && num_tokens * top_k < (1ll << 31),
               "{} experts of {} tokens × {}", experts.size(), num_tokens, top_k);
  ExpertRows rows{.num_tokens = num_tokens, .top_k = top_k};
  rows.begin.assign(static_cast<std::size_t>(num_experts + 1), 0);
  for (std::size_t slot = 0; slot < experts.size(); ++slot) {
    const std::int64_t expert = experts[slot];
    if (expert < 0 || expert >= num_experts) {
      invalid_argument("routing: token {} goes to expert {}: experts are 0 to {}",
                       slot / static_cast<std::size_t>(top_k), expert, num_experts - 1);
    }
    for (std::size_t other = slot - slot % static_cast<std::size_t>(top_k); other < slot; ++other) {
      if (experts[other] == experts[slot]) {
        invalid_argument("routing: token {} goes to expert {} twice: its experts must differ",
                         slot / static_cast<std::size_t>(top_k), expert);
      }
    }
    ++rows.begin[static_cast<std::size_t>(expert) + 1];
  }
  for (std::size_t e = 0; e < static_cast<std::size_t>(num_experts); ++e) rows.begin[e + 1] += rows.begin[e];
  rows.slot_of_row.resize(experts.size());
  rows.row_of_slot.resize(experts.size());
  std::vector<std::int64_t> next = rows.begin;
  for (std::size_t slot = 0; slot < experts.size(); ++slot) {
    const std::int64_t row = next[static_cast<std::size_t>(experts[slot])]++;
    rows.slot_of_row[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(slot);
    rows.row_of_slot[slot] = static_cast<std::int32_t>(row);
  }
  return rows;
}

void gather_slots(RankContext& ctx, std::string_view name, const Tensor& from, const ExpertRows& rows,
                  const Tensor& weights, const Tensor& to) {
  check_slots(name, rows, from, to, weights);
  run_kernel(ctx, name, elementwise_cost(to.numel(), weights ? 1 : 0, 1, 1, from.dtype()), [&] {
    visit_dtype(from.dtype(), [&]<class T>() {
      using S = Statistic<T>;
      for_rows(ctx, rows.num_rows(), [&](std::int64_t row) {
        const std::int64_t slot = rows.slot_of_row[static_cast<std::size_t>(row)];
        const T* source = row_of<T>(from, slot / rows.top_k);
        if (weights) {
          row_kernels<T>().scaled_sum(source, nullptr, weights.data<S>()[slot], from.size(1), row_of<T>(to, row));
        } else {
          std::copy_n(source, from.size(1), row_of<T>(to, row));
        }
      });
    });
  });
}

namespace {

/// One token's sum, a stretch of columns at a time.
template <class T>
void combine_token(const CombineSlots& a, const ExpertRows& rows, std::int64_t token) {
  using S = Statistic<T>;
  constexpr std::int64_t kStretch = 512;
  S sum[kStretch];
  const auto& kernels = row_kernels<T>();
  for (std::int64_t begin = 0; begin < a.out.size(1); begin += kStretch) {
    const std::int64_t width = std::min(kStretch, a.out.size(1) - begin);
    if (a.first) {
      kernels.widen(row_of<T>(a.first, token) + begin, width, sum);
    } else {
      std::fill_n(sum, width, S(0));
    }
    if (a.second) kernels.add_wide(sum, row_of<T>(a.second, token) + begin, width, sum);
    for (std::int64_t slot = token * rows.top_k; slot < (token + 1) * rows.top_k; ++slot) {
      const T* source = row_of<T>(a.from, rows.row_of_slot[static_cast<std::size_t>(slot)]) + begin;
      kernels.add_scaled(source, a.weights ? a.weights.data<S>()[slot] : S(1), width, sum);
    }
    kernels.narrow(sum, width, row_of<T>(a.out, token) + begin);
  }
}

}  // namespace

void combine_slots(RankContext& ctx, std::string_view name, const CombineSlots& a, const ExpertRows& rows) {
  check_slots(name, rows, a.out, a.from, a.weights);
  for (const Tensor* t : {&a.first, &a.second}) {
    if (t->defined()) check_rows(name, *t, rows.num_tokens, a.out.size(1));
  }
  const double reads = static_cast<double>(rows.top_k) + (a.first ? 1 : 0) + (a.second ? 1 : 0);
  run_kernel(ctx, name, elementwise_cost(a.out.numel(), 2 * reads, reads, 1, a.out.dtype()), [&] {
    visit_dtype(a.out.dtype(), [&]<class T>() {
      for_rows(ctx, rows.num_tokens, [&](std::int64_t token) { combine_token<T>(a, rows, token); });
    });
  });
}

void slot_dots(RankContext& ctx, std::string_view name, const Tensor& a, const Tensor& b, const ExpertRows& rows,
               const Tensor& out) {
  check_slots(name, rows, a, b, out);
  run_kernel(ctx, name, elementwise_cost(b.numel(), 2, 2, 0, a.dtype()), [&] {
    visit_dtype(a.dtype(), [&]<class T>() {
      for_rows(ctx, rows.num_tokens, [&](std::int64_t token) {
        for (std::int64_t slot = token * rows.top_k; slot < (token + 1) * rows.top_k; ++slot) {
          const T* row = row_of<T>(b, rows.row_of_slot[static_cast<std::size_t>(slot)]);
          out.data<Statistic<T>>()[slot] = row_kernels<T>().dot(row_of<T>(a, token), row, a.size(1));
        }
      });
    });
  });
}

}  // namespace isomer
