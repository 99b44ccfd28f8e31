// A GGUF file's tensors under the names and in the shapes of a Hugging Face checkpoint, dequantised as they are read.
//
// What differs from there: Llama files hold the rows of Q and K permuted, so that RoPE's halves become adjacent pairs;
// experts are stacked in one tensor; newer DeepSeek files split kv_b_proj into k_b, transposed per head, and v_b.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/gguf.h"

namespace isomer {

class GgufWeights {
 public:
  /// Throws isomer::Error for an architecture other than llama and deepseek2, and for shapes that don't fit together.
  explicit GgufWeights(std::shared_ptr<const GgufFile> file);

  const GgufFile& file() const { return *file_; }
  /// By name. `dtype` is f32 for quantised tensors, whose `encoding` then says what stands in the file; `bytes` are
  /// those in the file. A tensor that has no place in a checkpoint keeps its own name.
  const std::vector<TensorInfo>& tensors() const { return infos_; }
  /// Rows [begin, begin + length) of tensor `index`, into [length, width] float32; a tensor of one axis has rows of one
  /// element. The range must lie in the tensor.
  void read_rows(std::size_t index, std::int64_t begin, std::int64_t length, float* to) const;

 private:
  struct Source {
    const GgufTensor* tensor = nullptr;
    std::int64_t first_row = 0;          // of a stacked expert
    std::int64_t pairs_head_dim = 0;     // rows of each head stand in pairs: undo it
    const GgufTensor* values = nullptr;  // v_b beside k_b, which `tensor` then is
  };
  void add_all(std::string_view architecture);
  void add_layer_tensor(const GgufTensor& tensor, std::string_view architecture);
  void add_experts(const GgufTensor& tensor, const std::string& prefix, const std::string& suffix);
  void add_split_kv_b(const GgufTensor& keys, const std::string& name);
  void add(std::string name, Shape shape, const GgufTensor& tensor, Source source);
  void read_split_kv_b(const Source& source, std::int64_t begin, std::int64_t length, float* to) const;
  void decode_row(const GgufTensor& tensor, std::int64_t row, float* to) const;

  std::shared_ptr<const GgufFile> file_;
  std::int64_t num_heads_ = 0, num_kv_heads_ = 0;
  std::vector<TensorInfo> infos_;
  std::vector<Source> sources_;
};

}  // namespace isomer
