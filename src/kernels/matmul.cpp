#include "kernels/matmul.h"

#include <algorithm>

#include "core/cpu_features.h"
#include "cost/op_cost.h"
#include "kernels/cpu/few_rows.h"
#include "kernels/cpu/gemm.h"
#include "kernels/dispatch.h"
#include "kernels/gemm_tile.h"

namespace isomer {

namespace {

// A tile amortises the packing of its operands and still gives two threads something to share.
constexpr std::int64_t kTileM = 512;
constexpr std::int64_t kTileN = 1024;

/// Rows of unit stride that don't overlap; an axis of size 1 has no stride worth the name.
bool is_row_major(const Tensor& t) {
  return (t.stride(-1) == 1 || t.size(-1) <= 1) &&
         (t.stride(-2) >= std::max<std::int64_t>(1, t.size(-1)) || t.size(-2) <= 1);
}
bool is_column_major(const Tensor& t) { return is_row_major(t.transpose(-1, -2)); }

bool strides_fit(const Tensor& t) { return t.numel() == 0 || is_row_major(t) || is_column_major(t); }

void validate(std::string_view name, const Tensor& a, const Tensor& b, const Tensor& c, bool accumulate) {
  ISOMER_CHECK(a.dim() == b.dim() && b.dim() == c.dim() && (a.dim() == 2 || a.dim() == 3), "{}: {} · {} → {}", name,
               to_string(a.shape()), to_string(b.shape()), to_string(c.shape()));
  ISOMER_CHECK(a.size(-1) == b.size(-2) && a.size(-2) == c.size(-2) && b.size(-1) == c.size(-1), "{}: {} · {} → {}",
               name, to_string(a.shape()), to_string(b.shape()), to_string(c.shape()));
  ISOMER_CHECK(a.dim() == 2 || (a.size(0) == c.size(0) && b.size(0) == c.size(0)), "{}: batches of {} · {} → {}", name,
               to_string(a.shape()), to_string(b.shape()), to_string(c.shape()));
  ISOMER_CHECK(strides_fit(a) && strides_fit(b), "{}: operand strides {} and {}", name, to_string(a.strides()),
               to_string(b.strides()));
  ISOMER_CHECK(c.size(-1) <= 1 || c.stride(-1) == 1, "{}: result strides {}", name, to_string(c.strides()));
  ISOMER_CHECK(
      a.dtype() == b.dtype() && (c.dtype() == a.dtype() || (a.dtype() == DType::bf16 && c.dtype() == DType::f32)),
      "{}: {} · {} → {}", name, name_of(a.dtype()), name_of(b.dtype()), name_of(c.dtype()));
  ISOMER_CHECK(!accumulate || c.dtype() != DType::bf16, "{}: accumulation into bf16", name);
}

Tensor at_batch(const Tensor& t, std::int64_t index) { return t.dim() == 3 ? t.select(0, index) : t; }

cpu::GemmOperand operand(const Tensor& t) {
  // A dense column is given as such: libraries want the unit stride on the axis that has a length.
  const bool dense_column = t.size(-1) == 1 && t.stride(-2) == 1;
  if (is_row_major(t) && !dense_column) return {t.raw(), t.size(-2) == 1 ? t.size(-1) : t.stride(-2), false};
  return {t.raw(), t.size(-1) == 1 ? t.size(-2) : t.stride(-1), true};
}

/// Few rows by a matrix that is read column by column: no packing pays.
bool is_few_rows(const Tensor& a, const Tensor& b) {
  return cpu_features().avx512bf16 && a.dtype() == DType::bf16 && a.size(0) >= 1 && a.size(0) <= cpu::kFewRows &&
         a.size(1) >= 64 && a.stride(1) == 1 && b.stride(0) == 1 && b.size(1) > 1;
}

void multiply_few_rows(const Tensor& a, const Tensor& b, const Tensor& c, bool accumulate) {
  cpu::few_rows_avx512bf16({.m = c.size(0),
                            .n = c.size(1),
                            .k = a.size(1),
                            .a = static_cast<const std::uint16_t*>(a.raw()),
                            .lda = a.stride(0),
                            .b = static_cast<const std::uint16_t*>(b.raw()),
                            .ldb = b.stride(1),
                            .c = c.raw(),
                            .ldc = c.stride(0),
                            .float_result = c.dtype() == DType::f32,
                            .accumulate = accumulate});
}

}  // namespace

void multiply_tile(const Tensor& a, const Tensor& b, const Tensor& c, bool accumulate) {
  if (is_few_rows(a, b)) return multiply_few_rows(a, b, c, accumulate);
  cpu::gemm({.m = c.size(0),
             .n = c.size(1),
             .k = a.size(1),
             .in = a.dtype(),
             .out = c.dtype(),
             .a = operand(a),
             .b = operand(b),
             .c = c.raw(),
             .ldc = c.size(0) == 1 ? c.size(1) : c.stride(0),
             .accumulate = accumulate});
}

void matmul(RankContext& ctx, std::string_view name, const Tensor& a, const Tensor& b, const Tensor& c,
            bool accumulate) {
  validate(name, a, b, c, accumulate);
  const std::int64_t batch = c.dim() == 3 ? c.size(0) : 1;
  const std::int64_t m = c.size(-2), n = c.size(-1), k = a.size(-1);
  run_kernel(ctx, name, matmul_cost(batch, m, n, k, a.dtype(), c.dtype()), [&] {
    const std::int64_t tiles_m = (m + kTileM - 1) / kTileM;
    const std::int64_t tiles_n = (n + kTileN - 1) / kTileN;
    ctx.threads().parallel_for(batch * tiles_m * tiles_n, [&](std::int64_t task, int) {
      const std::int64_t begin_n = task % tiles_n * kTileN;
      const std::int64_t begin_m = task / tiles_n % tiles_m * kTileM;
      const std::int64_t index = task / (tiles_n * tiles_m);
      const std::int64_t rows = std::min(kTileM, m - begin_m), columns = std::min(kTileN, n - begin_n);
      const Tensor tile_a = at_batch(a, index).slice(0, begin_m, rows);
      const Tensor tile_b = at_batch(b, index).slice(1, begin_n, columns);
      const Tensor tile_c = at_batch(c, index).slice(0, begin_m, rows).slice(1, begin_n, columns);
      multiply_tile(tile_a, tile_b, tile_c, accumulate);
    });
  });
}

std::string describe_matmul(DType in, DType out) { return cpu::describe_gemm(in, out); }

}  // namespace isomer
