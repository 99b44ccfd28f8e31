// The attention core below its public entries: shapes (known in a dry run too), pointers and token lists. Plain data
// without library types, since files compiled for a larger instruction set include it.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace isomer {

/// Sizes alone; implementations decline and plan by these.
struct AttentionShape {
  DType dtype = DType::f32;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t key_width = 0;
  std::int64_t rope_width = 0;  // 0: no separate part
  std::int64_t value_width = 0;
  std::int64_t num_queries = 0;  // tokens of the query runs
  std::int64_t num_keys = 0;

  std::int64_t group_size() const { return num_kv_heads > 0 ? num_heads / num_kv_heads : 0; }
  /// Query heads that share a key head are columns side by side: column = query · group_size + head in group.
  std::int64_t num_columns() const { return num_queries * group_size(); }
};

/// A tensor [rows, heads, width] with adjacent columns. Strides in elements.
struct HeadRows {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t width = 0;
  DType dtype = DType::f32;

  template <class T>
  T* at(std::int64_t row, std::int64_t head) const {
    return static_cast<T*>(data) + row * row_stride + head * head_stride;
  }
};

/// The tokens of all runs, one after another. A query sees a key of its segment whose position is not larger; where
/// attention is not causal every key stands at the smallest position.
struct TokenList {
  const std::int64_t* row = nullptr;
  const std::int32_t* position = nullptr;
  const std::int32_t* segment = nullptr;
  std::int64_t size = 0;
};

struct AttentionProblem {
  AttentionShape shape;
  double scale = 1;
  // Index 0: the main part; 1: the rope part, of width 0 where there is none.
  HeadRows q[2];
  HeadRows k[2];
  HeadRows v;
  HeadRows out;
  void* lse = nullptr;  // [num_heads, num_query_rows], float or double
  std::int64_t lse_head_stride = 0;
  TokenList queries;
  TokenList keys;
  // Backward only.
  HeadRows dout;
  HeadRows dq[2];
  HeadRows dk[2];
  HeadRows dv;
  bool accumulate = false;
};

/// One column block of one key/value head over the keys [key_begin, key_end).
struct ForwardTask {
  std::int64_t kv_head = 0;
  std::int64_t column_begin = 0;
  std::int64_t num_columns = 0;
  std::int64_t key_begin = 0;
  std::int64_t key_end = 0;
  // Where keys are split: [num_columns, value_width] and [num_columns], float or double; null: write to the tensors.
  void* partial_out = nullptr;
  void* partial_lse = nullptr;
};

/// Rows of a sum over queries, one for each key: float, double for float64 inputs.
struct GradientRows {
  void* data = nullptr;
  std::int64_t stride = 0;  // in elements
  bool by_row = false;      // indexed by the token's tensor row, else by its place in the token list
};

/// One column block of one key/value head over all keys: writes dq, adds to the sums.
struct BackwardTask {
  std::int64_t kv_head = 0;
  std::int64_t column_begin = 0;
  std::int64_t num_columns = 0;
  GradientRows dk[2];
  GradientRows dv;
};

/// What a processor-specific file provides. `scratch` is aligned to 64 bytes, its size a function of the widths alone.
struct AttentionBlockKernels {
  std::int64_t (*forward_block_columns)(const AttentionShape& shape);
  std::int64_t (*backward_block_columns)(const AttentionShape& shape);
  std::int64_t (*forward_scratch_bytes)(const AttentionShape& shape);
  std::int64_t (*backward_scratch_bytes)(const AttentionShape& shape);
  void (*forward)(const AttentionProblem& problem, const ForwardTask& task, char* scratch);
  void (*backward)(const AttentionProblem& problem, const BackwardTask& task, char* scratch);
};

extern const AttentionBlockKernels kAttentionFewAvx512Bf16;      // the same for few columns
extern const AttentionBlockKernels kAttentionAvx512Bf16;         // bfloat16 products
extern const AttentionBlockKernels kAttentionAvx512;             // float32
extern const AttentionBlockKernels kAttentionAvx512StorageBf16;  // bfloat16 storage, float32 products
extern const AttentionBlockKernels kAttentionAvx2;
extern const AttentionBlockKernels kAttentionAvx2StorageBf16;
extern const AttentionBlockKernels kAttentionF64;

}  // namespace isomer
