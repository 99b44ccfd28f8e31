#include "kernels/head_ops.h"

#include <numeric>
#include <vector>

#include "cost/op_cost.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"
#include "kernels/row_tasks.h"

namespace isomer {

namespace {

using cpu::row_kernels;
using cpu::Statistic;

constexpr std::int64_t kLossRowsPerTask = 4;  // a row is a whole vocabulary
constexpr std::int64_t kIdsPerTask = 16;

void check_ids(std::string_view name, const Tensor& table, std::span<const std::int32_t> ids, const Tensor& rows) {
  check_rows(name, table, table.size(0), table.size(1));
  check_rows(name, rows, static_cast<std::int64_t>(ids.size()), table.size(1));
  for (const std::int32_t id : ids) {
    ISOMER_CHECK(id >= 0 && id < table.size(0), "{}: id {} of {}", name, id, table.size(0));
  }
}

}  // namespace

void embedding_rows(RankContext& ctx, std::string_view name, const Tensor& table, std::span<const std::int32_t> ids,
                    double scale, const Tensor& out) {
  check_ids(name, table, ids, out);
  run_kernel(ctx, name, elementwise_cost(out.numel(), scale == 1 ? 0 : 1, 1, 1, table.dtype()), [&] {
    visit_dtype(table.dtype(), [&]<class T>() {
      for_rows(ctx, out.size(0), [&](std::int64_t row) {
        const T* source = row_of<T>(table, ids[static_cast<std::size_t>(row)]);
        row_kernels<T>().scaled_sum(source, nullptr, static_cast<Statistic<T>>(scale), out.size(1),
                                    row_of<T>(out, row));
      });
    });
  });
}

void embedding_scatter(RankContext& ctx, std::string_view name, const Tensor& dx, std::span<const std::int32_t> ids,
                       double scale, const Tensor& dtable) {
  check_ids(name, dtable, ids, dx);
  ISOMER_CHECK(dtable.dtype() == statistic_dtype(dx.dtype()), "{}: {} into {}", name, name_of(dx.dtype()),
               name_of(dtable.dtype()));
  run_kernel(ctx, name, elementwise_cost(dx.numel(), 2, 2, 1, dx.dtype()), [&] {
    // Sorted by id, so that one thread has all rows of an id, and has them in order.
    std::vector<std::int32_t> order(ids.size());
    std::iota(order.begin(), order.end(), 0);
    const auto id_of = [&](std::size_t i) { return ids[static_cast<std::size_t>(order[i])]; };
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return ids[static_cast<std::size_t>(a)] < ids[static_cast<std::size_t>(b)];
    });
    std::vector<std::size_t> first;  // of each id's rows
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (i == 0 || id_of(i) != id_of(i - 1)) first.push_back(i);
    }
    const auto num_ids = static_cast<std::int64_t>(first.size());
    first.push_back(order.size());
    visit_dtype(dx.dtype(), [&]<class T>() {
      for_rows(
          ctx, num_ids,
          [&](std::int64_t index) {
            const auto u = static_cast<std::size_t>(index);
            for (std::size_t i = first[u]; i < first[u + 1]; ++i) {
              row_kernels<T>().add_scaled(row_of<T>(dx, order[i]), static_cast<Statistic<T>>(scale), dx.size(1),
                                          row_of<Statistic<T>>(dtable, id_of(i)));
            }
          },
          kIdsPerTask);
    });
  });
}

namespace {

template <class T>
void cross_entropy_row(const CrossEntropy& a, std::int64_t row) {
  using S = Statistic<T>;
  const auto index = static_cast<std::size_t>(row);
  const std::int64_t width = a.logits.size(1), target = a.targets[index];
  T* dlogits = a.dlogits ? row_of<T>(a.dlogits, row) : nullptr;
  a.losses[index] = 0;
  a.hits[index] = 0;
  if (target < 0) {
    if (dlogits != nullptr) std::fill_n(dlogits, width, T{});
    return;
  }
  const cpu::TokenLoss result =
      row_kernels<T>().cross_entropy(row_of<S>(a.logits, row), width, static_cast<S>(a.logit_scale), target,
                                     static_cast<S>(a.gradient_scale), dlogits);
  a.losses[index] = result.loss;
  a.hits[index] = result.greedy_hit ? 1 : 0;
}

}  // namespace

void cross_entropy(RankContext& ctx, std::string_view name, const CrossEntropy& a) {
  const std::int64_t num_rows = a.logits.size(0), width = a.logits.size(1);
  const auto count = static_cast<std::size_t>(num_rows);
  check_rows(name, a.logits, num_rows, width);
  if (a.dlogits) check_rows(name, a.dlogits, num_rows, width);
  ISOMER_CHECK(a.targets.size() == count && a.losses.size() == count && a.hits.size() == count,
               "{}: {} rows, {} targets", name, num_rows, a.targets.size());
  for (const std::int32_t target : a.targets) {
    ISOMER_CHECK(target < width, "{}: target {} of {}", name, target, width);
  }
  const DType dtype = a.dlogits ? a.dlogits.dtype() : a.logits.dtype();
  ISOMER_CHECK(a.logits.dtype() == statistic_dtype(dtype) && a.logit_scale > 0, "{}: logits are {}, scale {}", name,
               name_of(a.logits.dtype()), a.logit_scale);
  run_kernel(ctx, name, elementwise_cost(a.logits.numel(), 6, 2, a.dlogits ? 2 : 0, a.logits.dtype()), [&] {
    visit_dtype(dtype, [&]<class T>() {
      for_rows(
          ctx, num_rows, [&](std::int64_t row) { cross_entropy_row<T>(a, row); }, kLossRowsPerTask);
    });
  });
}

}  // namespace isomer
