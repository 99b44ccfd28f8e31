#include "kernels/grouped_matmul.h"

#include <algorithm>
#include <vector>

#include "cost/op_cost.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"
#include "kernels/gemm_tile.h"

namespace isomer {

namespace {

constexpr std::int64_t kTileM = 512;
constexpr std::int64_t kTileN = 1024;
// Up to this many elements a weight is packed anew for every piece in less time than code for a new shape is made.
constexpr std::int64_t kSmallWeight = 1 << 18;
constexpr std::int64_t kSmallestPiece = 16;

/// Calls body(begin, length) over [begin, end) in pieces of 512, 256, …, 16 and one rest: 6 + 15 lengths in all. As
/// one piece if not `split`.
template <class Body>
void for_pieces(std::int64_t begin, std::int64_t end, bool split, Body&& body) {
  std::int64_t size = kTileM;
  while (begin < end) {
    while (size > end - begin && size > kSmallestPiece) size /= 2;
    const std::int64_t length = split ? std::min(size, end - begin) : end - begin;
    body(begin, length);
    begin += length;
  }
}

/// A block of one group's result.
struct Block {
  std::size_t group;
  std::int64_t row, rows, column, columns;
};

void add_blocks(std::vector<Block>& blocks, std::size_t group, std::int64_t first, std::int64_t rows,
                std::int64_t columns) {
  for (std::int64_t row = 0; row < rows; row += kTileM) {
    for (std::int64_t column = 0; column < columns; column += kTileN) {
      blocks.push_back({group, first + row, std::min(kTileM, rows - row), column, std::min(kTileN, columns - column)});
    }
  }
}

void check_groups(std::string_view name, std::span<const std::int64_t> begin, std::size_t num_groups,
                  const Tensor& rows) {
  ISOMER_CHECK(begin.size() == num_groups + 1 && begin.front() == 0 && begin.back() == rows.size(0) &&
                   std::is_sorted(begin.begin(), begin.end()),
               "{}: {} groups over {} rows", name, num_groups, rows.size(0));
}

void check_operand(std::string_view name, const Tensor& t, std::int64_t rows, std::int64_t columns, DType dtype) {
  const bool strides = t.size(1) <= 1 || t.size(0) <= 1 || t.stride(1) == 1 || t.stride(0) == 1;
  ISOMER_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns && t.dtype() == dtype && strides,
               "{}: {} {} strides {}, expected {} [{}, {}]", name, name_of(t.dtype()), to_string(t.shape()),
               to_string(t.strides()), name_of(dtype), rows, columns);
}

}  // namespace

void grouped_matmul(RankContext& ctx, std::string_view name, const Tensor& a, std::span<const std::int64_t> begin,
                    std::span<const Tensor> b, const Tensor& c, bool accumulate) {
  const std::int64_t num_rows = a.size(0), k = a.size(1), n = c.size(1);
  check_groups(name, begin, b.size(), a);
  check_operand(name, a, num_rows, k, a.dtype());
  check_operand(name, c, num_rows, n, c.dtype());
  for (const Tensor& weight : b) check_operand(name, weight, k, n, a.dtype());
  ISOMER_CHECK(!accumulate || c.dtype() != DType::bf16, "{}: accumulation into bf16", name);
  OpCost cost = matmul_cost(1, num_rows, n, k, a.dtype(), c.dtype());
  cost.bytes_read += static_cast<double>(static_cast<std::int64_t>(b.size() - 1) * k * n * size_of(a.dtype()));
  run_kernel(ctx, name, cost, [&] {
    const bool split = k * n <= kSmallWeight;
    std::vector<Block> blocks;
    for (std::size_t g = 0; g < b.size(); ++g) add_blocks(blocks, g, begin[g], begin[g + 1] - begin[g], n);
    ctx.threads().parallel_for(static_cast<std::int64_t>(blocks.size()), [&](std::int64_t task, int) {
      const Block& block = blocks[static_cast<std::size_t>(task)];
      const Tensor weight = b[block.group].slice(1, block.column, block.columns);
      const Tensor result = c.slice(1, block.column, block.columns);
      for_pieces(block.row, block.row + block.rows, split, [&](std::int64_t row, std::int64_t length) {
        multiply_tile(a.slice(0, row, length), weight, result.slice(0, row, length), accumulate);
      });
    });
  });
}

void grouped_weight_gradient(RankContext& ctx, std::string_view name, const Tensor& dy, const Tensor& x,
                             std::span<const std::int64_t> begin, std::span<const Tensor> out, bool accumulate) {
  const std::int64_t n = dy.size(1), k = x.size(1), num_rows = x.size(0);
  check_groups(name, begin, out.size(), x);
  check_operand(name, dy, num_rows, n, x.dtype());
  check_operand(name, x, num_rows, k, x.dtype());
  for (const Tensor& gradient : out) check_operand(name, gradient, n, k, statistic_dtype(x.dtype()));
  OpCost cost = matmul_cost(1, n, k, num_rows, x.dtype(), statistic_dtype(x.dtype()));
  cost.bytes_written *= static_cast<double>(out.size());
  run_kernel(ctx, name, cost, [&] {
    const bool split = k * n <= kSmallWeight;
    std::vector<Block> blocks;
    for (std::size_t g = 0; g < out.size(); ++g) add_blocks(blocks, g, 0, n, k);
    ctx.threads().parallel_for(static_cast<std::int64_t>(blocks.size()), [&](std::int64_t task, int) {
      const Block& block = blocks[static_cast<std::size_t>(task)];
      const Tensor left = dy.slice(1, block.row, block.rows).transpose(0, 1);
      const Tensor right = x.slice(1, block.column, block.columns);
      const Tensor result = out[block.group].slice(0, block.row, block.rows).slice(1, block.column, block.columns);
      const std::int64_t first = begin[block.group], last = begin[block.group + 1];
      if (first == last) return multiply_tile(left.slice(1, 0, 0), right.slice(0, 0, 0), result, accumulate);
      for_pieces(first, last, split, [&](std::int64_t row, std::int64_t length) {
        multiply_tile(left.slice(1, row, length), right.slice(0, row, length), result, accumulate || row > first);
      });
    });
  });
}

}  // namespace isomer
