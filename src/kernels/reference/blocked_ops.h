// Double-precision matrix products and causal attention for references at real sizes: dgemm on tiles that are fixed by
// shape, so that a result does not depend on the number of threads.
#pragma once

#include <cstdint>
#include <functional>

namespace isomer::reference {

/// Calls body(task) for every task in [0, num_tasks) on `num_threads` threads of its own; the first exception is
/// rethrown here.
void parallel_tasks(std::int64_t num_tasks, int num_threads, const std::function<void(std::int64_t)>& body);

/// c [m, n] = alpha · a · b + beta · c, row-major; strides are those of the matrices as stored.
struct Gemm {
  std::int64_t m = 0, n = 0, k = 0;
  const double* a = nullptr;  // [m, k], or [k, m] if a_transposed
  std::int64_t a_stride = 0;
  bool a_transposed = false;
  const double* b = nullptr;  // [k, n], or [n, k] if b_transposed
  std::int64_t b_stride = 0;
  bool b_transposed = false;
  double* c = nullptr;  // [m, n]
  std::int64_t c_stride = 0;
  double alpha = 1, beta = 0;
};
/// On the calling thread.
void gemm(const Gemm& params);
/// Tile by tile on `num_threads` threads.
void gemm_tiled(const Gemm& params, int num_threads);

/// Queries, keys and values of one head of one sequence, all `seq` tokens long; a stride leads from token to token.
/// logit(i, t) = scale · (q_nope · k_nope(t) + q_rope · k_rope(t)), t ≤ i.
struct AttentionHead {
  std::int64_t seq = 0, nope_dim = 0, rope_dim = 0, v_dim = 0;
  double scale = 1;
  const double* q = nullptr;  // [seq, nope_dim + rope_dim], rotated
  std::int64_t q_stride = 0;
  const double* k_nope = nullptr;  // [seq, nope_dim]
  std::int64_t k_nope_stride = 0;
  const double* k_rope = nullptr;  // [seq, rope_dim], rotated
  std::int64_t k_rope_stride = 0;
  const double* v = nullptr;  // [seq, v_dim]
  std::int64_t v_stride = 0;
};

/// What the forward computes and the backward reads again.
struct AttentionHeadOutput {
  double* out = nullptr;  // [seq, v_dim]
  std::int64_t out_stride = 0;
  double* lse = nullptr;  // [seq]
  std::int64_t lse_stride = 0;
};

/// Gradients of one head; the strides of dq, dk_nope and dv are those of q, k_nope and v.
struct AttentionHeadGradients {
  const double* dout = nullptr;  // [seq, v_dim], stride of out
  double* dq = nullptr;          // [seq, nope_dim + rope_dim], written
  double* dk_nope = nullptr;     // [seq, nope_dim], added to
  double* dk_rope = nullptr;     // [seq, rope_dim], dense, added to
  double* dv = nullptr;          // [seq, v_dim], added to
};

/// At most 128 queries × seq scores stand at a time.
void attention_head_forward(const AttentionHead& head, const AttentionHeadOutput& output);
void attention_head_backward(const AttentionHead& head, const AttentionHeadOutput& output,
                             const AttentionHeadGradients& gradients);

}  // namespace isomer::reference
