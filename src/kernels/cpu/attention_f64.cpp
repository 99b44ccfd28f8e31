// Attention blocks in float64 on OpenBLAS: what references are computed with, so plain and only decently fast.
#include <cblas.h>

#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention_problem.h"

namespace isomer {

namespace {

constexpr std::int64_t kBlock = 128;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Scratch of one block pair. Query-sided arrays: [columns, width]; key-sided: [keys, width]; pairs: [columns, keys].
struct Buffers {
  Buffers(const AttentionShape& s, char* scratch)
      : key_width(s.key_width + s.rope_width), value_width(s.value_width), next(reinterpret_cast<double*>(scratch)) {
    q = take(key_width);
    k = take(key_width);
    dq = take(key_width);
    dk = take(key_width);
    v = take(value_width);
    out = take(value_width);
    dout = take(value_width);
    dv = take(value_width);
    p = take(kBlock);
    dp = take(kBlock);
    maximum = take(1);
    sum = take(1);
    delta = take(1);
  }
  static std::int64_t bytes(const AttentionShape& s) {
    return 8 * kBlock * (4 * (s.key_width + s.rope_width + s.value_width) + 2 * kBlock + 3);
  }
  double* take(std::int64_t width) {
    double* piece = next;
    next += kBlock * width;
    return piece;
  }
  std::int64_t key_width, value_width;
  double* next;
  double *q, *k, *dq, *dk, *v, *out, *dout, *dv, *p, *dp, *maximum, *sum, *delta;
};

/// c[m, n] = beta·c + op(a)·op(b), row-major; c has stride c_stride.
void product(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, std::int64_t m, std::int64_t n, std::int64_t k, const double* a,
             std::int64_t a_stride, const double* b, std::int64_t b_stride, double beta, double* c,
             std::int64_t c_stride) {
  if (m == 0 || n == 0) return;
  use_one_library_thread();
  cblas_dgemm(CblasRowMajor, ta, tb, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), 1.0, a,
              static_cast<int>(std::max<std::int64_t>(1, a_stride)), b,
              static_cast<int>(std::max<std::int64_t>(1, b_stride)), beta, c, static_cast<int>(c_stride));
}

struct Column {
  std::int64_t row, head;
  std::int32_t position, segment;
};

Column column_at(const AttentionProblem& p, std::int64_t kv_head, std::int64_t column) {
  const std::int64_t group = p.shape.group_size();
  const std::int64_t query = column / group;
  return {p.queries.row[query], kv_head * group + column % group, p.queries.position[query], p.queries.segment[query]};
}

bool sees(const AttentionProblem& p, const Column& c, std::int64_t key) {
  return c.segment == p.keys.segment[key] && c.position >= p.keys.position[key];
}

bool any_seen(const AttentionProblem& p, const Column* columns, std::int64_t num_columns, std::int64_t begin,
              std::int64_t count) {
  for (std::int64_t c = 0; c < num_columns; ++c)
    for (std::int64_t key = begin; key < begin + count; ++key)
      if (sees(p, columns[c], key)) return true;
  return false;
}

void load_row(const HeadRows (&x)[2], std::int64_t row, std::int64_t head, std::int64_t rope_head, double* dst) {
  std::copy_n(x[0].at<double>(row, head), x[0].width, dst);
  if (x[1].width > 0) std::copy_n(x[1].at<double>(row, rope_head), x[1].width, dst + x[0].width);
}

void load_keys(const AttentionProblem& p, std::int64_t kv_head, std::int64_t begin, std::int64_t count,
               const Buffers& b) {
  for (std::int64_t i = 0; i < count; ++i) {
    load_row(p.k, p.keys.row[begin + i], kv_head, 0, b.k + i * b.key_width);
    std::copy_n(p.v.at<double>(p.keys.row[begin + i], kv_head), b.value_width, b.v + i * b.value_width);
  }
}

/// p = scale · q·kᵀ, −∞ where unseen.
void load_logits(const AttentionProblem& p, const Column* columns, std::int64_t num_columns, std::int64_t begin,
                 std::int64_t count, const Buffers& b) {
  product(CblasNoTrans, CblasTrans, num_columns, count, b.key_width, b.q, b.key_width, b.k, b.key_width, 0, b.p,
          kBlock);
  for (std::int64_t c = 0; c < num_columns; ++c)
    for (std::int64_t i = 0; i < count; ++i)
      b.p[c * kBlock + i] = sees(p, columns[c], begin + i) ? p.scale * b.p[c * kBlock + i] : -kInfinity;
}

/// Turns one row of logits into probabilities against the running maximum, which it follows.
void exponentiate(double* p, std::int64_t count, std::int64_t width, double& maximum, double& sum, double* out) {
  const double after = std::max(maximum, *std::max_element(p, p + count));
  if (after == -kInfinity) {
    std::fill_n(p, count, 0.0);
    return;
  }
  const double change = std::exp(maximum - after);
  if (change != 1) {
    sum *= change;
    for (std::int64_t j = 0; j < width; ++j) out[j] *= change;
  }
  maximum = after;
  for (std::int64_t i = 0; i < count; ++i) sum += p[i] = std::exp(p[i] - after);
}

void write_out(const AttentionProblem& p, const ForwardTask& task, const Column& column, std::int64_t c,
               const Buffers& b) {
  const bool empty = b.maximum[c] == -kInfinity && b.sum[c] == 0;
  double* out = task.partial_out != nullptr ? static_cast<double*>(task.partial_out) + c * b.value_width
                                            : p.out.at<double>(column.row, column.head);
  double* lse = task.partial_lse != nullptr
                    ? static_cast<double*>(task.partial_lse) + c
                    : static_cast<double*>(p.lse) + column.head * p.lse_head_stride + column.row;
  for (std::int64_t j = 0; j < b.value_width; ++j) out[j] = empty ? 0 : b.out[c * b.value_width + j] / b.sum[c];
  *lse = empty ? -kInfinity : b.maximum[c] + std::log(b.sum[c]);
}

void forward(const AttentionProblem& p, const ForwardTask& task, char* scratch) {
  const Buffers b(p.shape, scratch);
  const std::int64_t m = task.num_columns;
  Column columns[kBlock];
  for (std::int64_t c = 0; c < m; ++c) {
    columns[c] = column_at(p, task.kv_head, task.column_begin + c);
    load_row(p.q, columns[c].row, columns[c].head, columns[c].head, b.q + c * b.key_width);
  }
  std::fill_n(b.out, m * b.value_width, 0.0);
  std::fill_n(b.sum, m, 0.0);
  std::fill_n(b.maximum, m, -kInfinity);
  for (std::int64_t begin = task.key_begin; begin < task.key_end; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, task.key_end - begin);
    if (!any_seen(p, columns, m, begin, count)) continue;
    load_keys(p, task.kv_head, begin, count, b);
    load_logits(p, columns, m, begin, count, b);
    for (std::int64_t c = 0; c < m; ++c)
      exponentiate(b.p + c * kBlock, count, b.value_width, b.maximum[c], b.sum[c], b.out + c * b.value_width);
    product(CblasNoTrans, CblasNoTrans, m, b.value_width, count, b.p, kBlock, b.v, b.value_width, 1, b.out,
            b.value_width);
  }
  for (std::int64_t c = 0; c < m; ++c) write_out(p, task, columns[c], c, b);
}

/// Adds [keys, width] to the sums of keys.
void add_to_keys(const AttentionProblem& p, const GradientRows& sums, std::int64_t begin, std::int64_t count,
                 const double* src, std::int64_t stride, std::int64_t width) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t at = sums.by_row ? p.keys.row[begin + i] : begin + i;
    double* dst = static_cast<double*>(sums.data) + at * sums.stride;
    for (std::int64_t j = 0; j < width; ++j) dst[j] += src[i * stride + j];
  }
}

void load_columns(const AttentionProblem& p, const BackwardTask& task, Column* columns, const Buffers& b) {
  for (std::int64_t c = 0; c < task.num_columns; ++c) {
    columns[c] = column_at(p, task.kv_head, task.column_begin + c);
    const Column& column = columns[c];
    load_row(p.q, column.row, column.head, column.head, b.q + c * b.key_width);
    const double* out = p.out.at<double>(column.row, column.head);
    const double* dout = p.dout.at<double>(column.row, column.head);
    std::copy_n(dout, b.value_width, b.dout + c * b.value_width);
    b.delta[c] = 0;
    for (std::int64_t j = 0; j < b.value_width; ++j) b.delta[c] += out[j] * dout[j];
    const double lse = static_cast<const double*>(p.lse)[column.head * p.lse_head_stride + column.row];
    b.maximum[c] = lse == -kInfinity ? kInfinity : lse;
  }
  std::fill_n(b.dq, task.num_columns * b.key_width, 0.0);
}

template <class T>
void write_gradient(const HeadRows& x, const Column& column, const double* src, bool accumulate) {
  T* dst = x.at<T>(column.row, column.head);
  for (std::int64_t j = 0; j < x.width; ++j) dst[j] = static_cast<T>(accumulate ? dst[j] + src[j] : src[j]);
}

void write_queries(const AttentionProblem& p, const Column& column, const double* dq) {
  for (int part = 0; part < 2; dq += p.dq[part].width, ++part) {
    if (p.dq[part].width == 0) continue;
    if (p.dq[part].dtype == DType::f64) {
      write_gradient<double>(p.dq[part], column, dq, p.accumulate);
    } else {
      write_gradient<float>(p.dq[part], column, dq, p.accumulate);
    }
  }
}

void backward(const AttentionProblem& p, const BackwardTask& task, char* scratch) {
  const Buffers b(p.shape, scratch);
  const std::int64_t m = task.num_columns;
  Column columns[kBlock];
  load_columns(p, task, columns, b);
  for (std::int64_t begin = 0; begin < p.keys.size; begin += kBlock) {
    const std::int64_t n = std::min(kBlock, p.keys.size - begin);
    if (!any_seen(p, columns, m, begin, n)) continue;
    load_keys(p, task.kv_head, begin, n, b);
    load_logits(p, columns, m, begin, n, b);
    product(CblasNoTrans, CblasTrans, m, n, b.value_width, b.dout, b.value_width, b.v, b.value_width, 0, b.dp, kBlock);
    for (std::int64_t c = 0; c < m; ++c) {
      for (std::int64_t i = c * kBlock; i < c * kBlock + n; ++i) {
        b.p[i] = std::exp(b.p[i] - b.maximum[c]);
        b.dp[i] = p.scale * b.p[i] * (b.dp[i] - b.delta[c]);
      }
    }
    product(CblasNoTrans, CblasNoTrans, m, b.key_width, n, b.dp, kBlock, b.k, b.key_width, 1, b.dq, b.key_width);
    product(CblasTrans, CblasNoTrans, n, b.key_width, m, b.dp, kBlock, b.q, b.key_width, 0, b.dk, b.key_width);
    product(CblasTrans, CblasNoTrans, n, b.value_width, m, b.p, kBlock, b.dout, b.value_width, 0, b.dv, b.value_width);
    add_to_keys(p, task.dk[0], begin, n, b.dk, b.key_width, p.k[0].width);
    if (p.k[1].width > 0) add_to_keys(p, task.dk[1], begin, n, b.dk + p.k[0].width, b.key_width, p.k[1].width);
    add_to_keys(p, task.dv, begin, n, b.dv, b.value_width, b.value_width);
  }
  for (std::int64_t c = 0; c < m; ++c) write_queries(p, columns[c], b.dq + c * b.key_width);
}

std::int64_t block_columns(const AttentionShape&) { return kBlock; }

}  // namespace

const AttentionBlockKernels kAttentionF64 = {block_columns,  block_columns, Buffers::bytes,
                                             Buffers::bytes, forward,       backward};

}  // namespace isomer
