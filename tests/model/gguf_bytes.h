// GGUF files made byte by byte, well and malformed.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace isomer {

class GgufBytes {
 public:
  void text(const std::string& key, std::string_view value) { raw(key, 8, with_length(value)); }
  void integer(const std::string& key, std::uint32_t value) { raw(key, 4, number(value)); }
  void decimal(const std::string& key, float value) { raw(key, 6, number(value)); }
  /// A value of type `type`, as it stands in the file.
  void raw(const std::string& key, std::uint32_t type, std::string_view value) {
    metadata_ += with_length(key) + number(type) + std::string(value);
    ++num_metadata_;
  }
  /// `sizes`: fastest first, as in the file. Behind the data so far, or at `offset` in the data.
  void tensor(const std::string& name, std::uint32_t type, const std::vector<std::uint64_t>& sizes, std::string data,
              std::optional<std::uint64_t> offset = std::nullopt) {
    data_.resize((data_.size() + kAlignment - 1) / kAlignment * kAlignment);
    table_ += with_length(name) + number(static_cast<std::uint32_t>(sizes.size()));
    for (const auto size : sizes) table_ += number(size);
    table_ += number(type) + number(offset.value_or(data_.size()));
    data_ += data;
    ++num_tensors_;
  }
  static std::string floats(const std::vector<float>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
  }

  std::size_t num_tensors() const { return num_tensors_; }
  std::string bytes() const {
    std::string file = "GGUF" + number(std::uint32_t{3}) + number(std::uint64_t{num_tensors_}) +
                       number(std::uint64_t{num_metadata_}) + metadata_ + table_;
    file.resize((file.size() + kAlignment - 1) / kAlignment * kAlignment);
    return file + data_;
  }

 private:
  static constexpr std::size_t kAlignment = 32;

  template <class T>
  static std::string number(T value) {
    std::string bytes(sizeof(T), '\0');
    std::memcpy(bytes.data(), &value, sizeof(T));
    return bytes;
  }
  static std::string with_length(std::string_view value) {
    return number(static_cast<std::uint64_t>(value.size())) + std::string(value);
  }

  std::string metadata_, table_, data_;
  std::size_t num_tensors_ = 0, num_metadata_ = 0;
};

/// The metadata and the embedding of a Llama with 2 heads of 4, 3 tokens; its layers are missing.
inline GgufBytes tiny_llama() {
  GgufBytes file;
  file.text("general.architecture", "llama");
  file.integer("llama.block_count", 1);
  file.integer("llama.context_length", 16);
  file.integer("llama.embedding_length", 8);
  file.integer("llama.feed_forward_length", 8);
  file.integer("llama.attention.head_count", 2);
  file.decimal("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  file.tensor("token_embd.weight", 0, {8, 3}, std::string(96, '\0'));
  return file;
}

}  // namespace isomer
