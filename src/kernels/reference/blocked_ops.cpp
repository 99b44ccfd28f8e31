#include "kernels/reference/blocked_ops.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include <cblas.h>

#include "kernels/cpu/gemm.h"

namespace isomer::reference {
namespace {

constexpr std::int64_t kTile = 512;        // rows and columns of a product's tile
constexpr std::int64_t kQueryBlock = 128;  // queries whose scores stand at a time

std::int64_t num_blocks(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }

/// scores [end − begin, end] of the queries [begin, end) against the keys [0, end); the causal mask is not applied.
void compute_scores(const AttentionHead& head, std::int64_t begin, std::int64_t end, double* scores) {
  const double* q = head.q + begin * head.q_stride;
  gemm({.m = end - begin,
        .n = end,
        .k = head.nope_dim,
        .a = q,
        .a_stride = head.q_stride,
        .b = head.k_nope,
        .b_stride = head.k_nope_stride,
        .b_transposed = true,
        .c = scores,
        .c_stride = end,
        .alpha = head.scale});
  gemm({.m = end - begin,
        .n = end,
        .k = head.rope_dim,
        .a = q + head.nope_dim,
        .a_stride = head.q_stride,
        .b = head.k_rope,
        .b_stride = head.k_rope_stride,
        .b_transposed = true,
        .c = scores,
        .c_stride = end,
        .alpha = head.scale,
        .beta = 1});
}

/// Turns scores into probabilities, zero behind the diagonal, and writes the LSE of each query.
void causal_softmax(std::int64_t begin, std::int64_t end, double* scores, const AttentionHeadOutput& output) {
  for (std::int64_t i = begin; i < end; ++i) {
    double* row = scores + (i - begin) * end;
    const double largest = *std::max_element(row, row + i + 1);
    double sum = 0;
    for (std::int64_t t = 0; t <= i; ++t) sum += row[t] = std::exp(row[t] - largest);
    for (std::int64_t t = 0; t <= i; ++t) row[t] /= sum;
    std::fill(row + i + 1, row + end, 0.0);
    output.lse[i * output.lse_stride] = largest + std::log(sum);
  }
}

/// Turns scores into probabilities by the known LSE, and dp, the gradient of the probabilities, into scale · gradient
/// of the logits.
void softmax_backward(const AttentionHead& head, std::int64_t begin, std::int64_t end,
                      const AttentionHeadOutput& output, const double* dout, double* scores, double* dp) {
  for (std::int64_t i = begin; i < end; ++i) {
    const double* out_row = output.out + i * output.out_stride;
    const double* dout_row = dout + i * output.out_stride;
    double delta = 0;  // Σ_t p_t dp_t
    for (std::int64_t j = 0; j < head.v_dim; ++j) delta += out_row[j] * dout_row[j];
    const double lse = output.lse[i * output.lse_stride];
    double* p = scores + (i - begin) * end;
    double* ds = dp + (i - begin) * end;
    for (std::int64_t t = 0; t <= i; ++t) {
      p[t] = std::exp(p[t] - lse);
      ds[t] = head.scale * p[t] * (ds[t] - delta);
    }
    std::fill(p + i + 1, p + end, 0.0);
    std::fill(ds + i + 1, ds + end, 0.0);
  }
}

}  // namespace

void parallel_tasks(std::int64_t num_tasks, int num_threads, const std::function<void(std::int64_t)>& body) {
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    try {
      for (std::int64_t task; (task = next.fetch_add(1)) < num_tasks;) body(task);
    } catch (...) {
      next = num_tasks;
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> workers;
    const std::int64_t num_workers = std::min<std::int64_t>(num_threads, num_tasks) - 1;
    for (std::int64_t i = 0; i < num_workers; ++i) workers.emplace_back(work);
    work();
  }
  if (error) std::rethrow_exception(error);
}

void gemm(const Gemm& p) {
  const auto width = [](std::int64_t value) { return static_cast<blasint>(std::max<std::int64_t>(value, 1)); };
  if (p.m == 0 || p.n == 0) return;
  cpu::use_one_library_thread();
  cblas_dgemm(CblasRowMajor, p.a_transposed ? CblasTrans : CblasNoTrans, p.b_transposed ? CblasTrans : CblasNoTrans,
              static_cast<blasint>(p.m), static_cast<blasint>(p.n), static_cast<blasint>(p.k), p.alpha, p.a,
              width(p.a_stride), p.b, width(p.b_stride), p.beta, p.c, width(p.c_stride));
}

void gemm_tiled(const Gemm& params, int num_threads) {
  const std::int64_t row_tiles = num_blocks(params.m, kTile);
  const std::int64_t column_tiles = num_blocks(params.n, kTile);
  parallel_tasks(row_tiles * column_tiles, num_threads, [&](std::int64_t task) {
    const std::int64_t row = task / column_tiles * kTile;
    const std::int64_t column = task % column_tiles * kTile;
    Gemm tile = params;
    tile.m = std::min(kTile, params.m - row);
    tile.n = std::min(kTile, params.n - column);
    tile.a += params.a_transposed ? row : row * params.a_stride;
    tile.b += params.b_transposed ? column * params.b_stride : column;
    tile.c += row * params.c_stride + column;
    gemm(tile);
  });
}

void attention_head_forward(const AttentionHead& head, const AttentionHeadOutput& output) {
  std::vector<double> scores(static_cast<std::size_t>(std::min(kQueryBlock, head.seq) * head.seq));
  for (std::int64_t begin = 0; begin < head.seq; begin += kQueryBlock) {
    const std::int64_t end = std::min(begin + kQueryBlock, head.seq);
    compute_scores(head, begin, end, scores.data());
    causal_softmax(begin, end, scores.data(), output);
    gemm({.m = end - begin,
          .n = head.v_dim,
          .k = end,
          .a = scores.data(),
          .a_stride = end,
          .b = head.v,
          .b_stride = head.v_stride,
          .c = output.out + begin * output.out_stride,
          .c_stride = output.out_stride});
  }
}

void attention_head_backward(const AttentionHead& head, const AttentionHeadOutput& output,
                             const AttentionHeadGradients& gradients) {
  std::vector<double> scores(static_cast<std::size_t>(std::min(kQueryBlock, head.seq) * head.seq));
  std::vector<double> dscores(scores.size());
  for (std::int64_t begin = 0; begin < head.seq; begin += kQueryBlock) {
    const std::int64_t end = std::min(begin + kQueryBlock, head.seq);
    const std::int64_t rows = end - begin;
    const double* q = head.q + begin * head.q_stride;
    const double* dout = gradients.dout + begin * output.out_stride;
    double* dq = gradients.dq + begin * head.q_stride;
    compute_scores(head, begin, end, scores.data());
    gemm({.m = rows,
          .n = end,
          .k = head.v_dim,
          .a = dout,
          .a_stride = output.out_stride,
          .b = head.v,
          .b_stride = head.v_stride,
          .b_transposed = true,
          .c = dscores.data(),
          .c_stride = end});
    softmax_backward(head, begin, end, output, gradients.dout, scores.data(), dscores.data());
    const double* p = scores.data();
    const double* ds = dscores.data();
    gemm({.m = end,
          .n = head.v_dim,
          .k = rows,
          .a = p,
          .a_stride = end,
          .a_transposed = true,
          .b = dout,
          .b_stride = output.out_stride,
          .c = gradients.dv,
          .c_stride = head.v_stride,
          .beta = 1});
    gemm({.m = rows,
          .n = head.nope_dim,
          .k = end,
          .a = ds,
          .a_stride = end,
          .b = head.k_nope,
          .b_stride = head.k_nope_stride,
          .c = dq,
          .c_stride = head.q_stride});
    gemm({.m = rows,
          .n = head.rope_dim,
          .k = end,
          .a = ds,
          .a_stride = end,
          .b = head.k_rope,
          .b_stride = head.k_rope_stride,
          .c = dq + head.nope_dim,
          .c_stride = head.q_stride});
    gemm({.m = end,
          .n = head.nope_dim,
          .k = rows,
          .a = ds,
          .a_stride = end,
          .a_transposed = true,
          .b = q,
          .b_stride = head.q_stride,
          .c = gradients.dk_nope,
          .c_stride = head.k_nope_stride,
          .beta = 1});
    gemm({.m = end,
          .n = head.rope_dim,
          .k = rows,
          .a = ds,
          .a_stride = end,
          .a_transposed = true,
          .b = q + head.nope_dim,
          .b_stride = head.q_stride,
          .c = gradients.dk_rope,
          .c_stride = head.rope_dim,
          .beta = 1});
  }
}

}  // namespace isomer::reference
