#include "kernels/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace isomer::reference {

namespace {

struct Token {
  std::int64_t row;
  std::int64_t position;
  int segment;
};

std::vector<Token> tokens_of(const std::vector<TokenRun>& runs) {
  std::vector<Token> tokens;
  for (const TokenRun& run : runs)
    for (std::int64_t i = 0; i < run.length; ++i)
      tokens.push_back({run.row + i * run.row_stride, run.position + i, run.segment});
  return tokens;
}

double read(const Tensor& x, std::int64_t offset) {
  return visit_dtype(x.dtype(), [&]<class T>() { return static_cast<double>(x.data<T>()[offset]); });
}
void write(const Tensor& x, std::int64_t offset, double value) {
  visit_dtype(x.dtype(), [&]<class T>() { x.data<T>()[offset] = static_cast<T>(value); });
}

std::int64_t row_offset(const Tensor& x, std::int64_t row, std::int64_t head) {
  return row * x.stride(0) + head * x.stride(1);
}

/// One row of a [rows, heads, width] tensor; empty for an undefined one.
std::vector<double> read_row(const Tensor& x, std::int64_t row, std::int64_t head) {
  std::vector<double> values(static_cast<std::size_t>(x.defined() ? x.size(2) : 0));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = read(x, row_offset(x, row, head) + static_cast<std::int64_t>(i));
  return values;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// sum += factor · x.
void add(std::vector<double>& sum, double factor, const std::vector<double>& x) {
  for (std::size_t i = 0; i < x.size(); ++i) sum[i] += factor * x[i];
}

bool sees(const AttentionInputs& in, const Token& query, const Token& key) {
  return query.segment == key.segment && (!in.causal || query.position >= key.position);
}

/// The logits of one query of one head, −∞ for keys it does not see.
std::vector<double> logits(const AttentionInputs& in, const Token& query, std::int64_t head, std::int64_t kv_head,
                           const std::vector<Token>& keys) {
  const auto q = read_row(in.q, query.row, head);
  const auto q_rope = read_row(in.q_rope, query.row, head);
  std::vector<double> result(keys.size(), -std::numeric_limits<double>::infinity());
  for (std::size_t j = 0; j < keys.size(); ++j) {
    if (!sees(in, query, keys[j])) continue;
    result[j] =
        in.scale * (dot(q, read_row(in.k, keys[j].row, kv_head)) + dot(q_rope, read_row(in.k_rope, keys[j].row, 0)));
  }
  return result;
}

using Rows = std::vector<std::vector<double>>;  // [tokens][width]

Rows zero_rows(std::size_t num_tokens, const Tensor& like) {
  return Rows(num_tokens, std::vector<double>(static_cast<std::size_t>(like.defined() ? like.size(2) : 0)));
}

void write_rows(const Tensor& x, const std::vector<Token>& tokens, std::int64_t head, const Rows& values,
                bool accumulate) {
  if (!x.defined()) return;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (std::size_t j = 0; j < values[i].size(); ++j) {
      const std::int64_t at = row_offset(x, tokens[i].row, head) + static_cast<std::int64_t>(j);
      write(x, at, accumulate ? read(x, at) + values[i][j] : values[i][j]);
    }
  }
}

}  // namespace

void attention_forward(const AttentionInputs& in, const Tensor& out, const Tensor& lse) {
  const auto queries = tokens_of(in.query_runs);
  const auto keys = tokens_of(in.key_runs);
  for (std::int64_t head = 0; head < in.q.size(1); ++head) {
    const std::int64_t kv_head = head * in.k.size(1) / in.q.size(1);
    for (const Token& query : queries) {
      const auto s = logits(in, query, head, kv_head, keys);
      double largest = -std::numeric_limits<double>::infinity();
      for (double x : s) largest = std::max(largest, x);
      double sum = 0;
      std::vector<double> o(static_cast<std::size_t>(out.size(2)));
      for (std::size_t j = 0; j < keys.size(); ++j) {
        if (!sees(in, query, keys[j])) continue;
        const double p = std::exp(s[j] - largest);
        sum += p;
        add(o, p, read_row(in.v, keys[j].row, kv_head));
      }
      const bool seen = sum > 0 || std::isnan(sum);
      for (std::size_t i = 0; i < o.size(); ++i)
        write(out, row_offset(out, query.row, head) + static_cast<std::int64_t>(i), seen ? o[i] / sum : 0);
      write(lse, head * lse.stride(0) + query.row * lse.stride(1), seen ? largest + std::log(sum) : largest);
    }
  }
}

void attention_backward(const AttentionInputs& in, const Tensor& out, const Tensor& lse, const Tensor& dout,
                        const AttentionGradients& gradients) {
  const auto queries = tokens_of(in.query_runs);
  const auto keys = tokens_of(in.key_runs);
  const std::int64_t group = in.k.size(1) > 0 ? in.q.size(1) / in.k.size(1) : 0;
  Rows dk_rope = zero_rows(keys.size(), in.k_rope);
  for (std::int64_t kv_head = 0; kv_head < in.k.size(1); ++kv_head) {
    Rows dk = zero_rows(keys.size(), in.k);
    Rows dv = zero_rows(keys.size(), in.v);
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      Rows dq = zero_rows(queries.size(), in.q);
      Rows dq_rope = zero_rows(queries.size(), in.q_rope);
      for (std::size_t i = 0; i < queries.size(); ++i) {
        const auto s = logits(in, queries[i], head, kv_head, keys);
        const auto d_o = read_row(dout, queries[i].row, head);
        const double delta = dot(d_o, read_row(out, queries[i].row, head));
        const double statistic = read(lse, head * lse.stride(0) + queries[i].row * lse.stride(1));
        for (std::size_t j = 0; j < keys.size(); ++j) {
          if (!sees(in, queries[i], keys[j])) continue;
          const double p = std::exp(s[j] - statistic);
          const double ds = in.scale * p * (dot(d_o, read_row(in.v, keys[j].row, kv_head)) - delta);
          add(dv[j], p, d_o);
          add(dk[j], ds, read_row(in.q, queries[i].row, head));
          add(dk_rope[j], ds, read_row(in.q_rope, queries[i].row, head));
          add(dq[i], ds, read_row(in.k, keys[j].row, kv_head));
          add(dq_rope[i], ds, read_row(in.k_rope, keys[j].row, 0));
        }
      }
      write_rows(gradients.dq, queries, head, dq, gradients.accumulate);
      write_rows(gradients.dq_rope, queries, head, dq_rope, gradients.accumulate);
    }
    write_rows(gradients.dk, keys, kv_head, dk, gradients.accumulate);
    write_rows(gradients.dv, keys, kv_head, dv, gradients.accumulate);
  }
  write_rows(gradients.dk_rope, keys, 0, dk_rope, gradients.accumulate);
}

}  // namespace isomer::reference
