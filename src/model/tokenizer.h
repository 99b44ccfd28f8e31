// Byte-level BPE, as a Hugging Face tokenizer.json describes it. docs/tokenizer.md lists what is supported; anything
// else in a file is refused by an error that names the field and its value.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace isomer {

struct TokenizerData;

/// Offset of the first byte of `text` that isn't valid UTF-8; nullopt if all of it is.
std::optional<std::size_t> invalid_utf8_at(std::string_view text);
/// `text` with every ill-formed sequence replaced by U+FFFD, one for each maximal part (as Python's errors="replace"
/// and Rust's from_utf8_lossy do).
std::string replace_invalid_utf8(std::string_view text);

/// Texts of a tokenizer.json and of the tokenizer_config.json beside it, which may be empty.
struct TokenizerTexts {
  std::string json, config_json;
};

/// Immutable after construction; copies share everything. All const members may be called by several threads at once.
class Tokenizer {
 public:
  /// Reads `path`, a tokenizer.json, a directory that holds one, or a GGUF file. A tokenizer_config.json beside it,
  /// where there is one, names the BOS and EOS tokens. Throws isomer::Error naming file, field and value.
  static Tokenizer load(const std::filesystem::path& path);
  /// What load parses.
  static TokenizerTexts texts_at(const std::filesystem::path& path);
  /// Whether there is one to load for the model at `path`: its directory has a tokenizer.json, or its GGUF file
  /// tokens. Throws isomer::Error for a GGUF file that is wrong.
  static bool is_at(const std::filesystem::path& path);
  /// Parses the text of a tokenizer.json, and of a tokenizer_config.json if given; `source` goes into errors.
  static Tokenizer parse(std::string_view json, std::string_view source = "tokenizer.json",
                         std::string_view config_json = {});

  /// Token ids of `text`, the same as `tokenizers` gives. With `add_special`, those that the post-processor's template
  /// adds (BOS, say) too. Text that isn't UTF-8 throws std::invalid_argument naming the byte's offset;
  /// replace_invalid_utf8 makes of it what the reference would read.
  std::vector<std::int32_t> encode(std::string_view text, bool add_special = false) const;
  /// The bytes of `ids`, exact even where a character is split over tokens and the end is not whole. Special tokens are
  /// left out with `skip_special`. Throws std::invalid_argument for an id that has no token.
  std::string decode(std::span<const std::int32_t> ids, bool skip_special = false) const;

  /// One more than the largest id: the rows that an embedding needs.
  std::int64_t vocab_size() const;
  /// The id of a token by its content: an added token's text, or an entry of the model's vocabulary as it stands in the
  /// file (bytes written as visible characters).
  std::optional<std::int32_t> id_of(std::string_view token) const;
  /// The token's content as in the file; nullopt for an id without one.
  std::optional<std::string_view> token_of(std::int32_t id) const;
  bool is_special(std::int32_t id) const;
  /// From tokenizer_config.json; else, for bos, what the template puts first; else <|endoftext|> where it exists.
  std::optional<std::int32_t> bos_id() const;
  std::optional<std::int32_t> eos_id() const;
  /// FNV-1a of the text it was parsed from: two tokenizers with the same hash give the same tokens.
  std::uint64_t hash() const;
  /// The text it was parsed from.
  const std::string& to_json() const;

 private:
  explicit Tokenizer(std::shared_ptr<const TokenizerData> data) : data_(std::move(data)) {}
  std::shared_ptr<const TokenizerData> data_;
};

}  // namespace isomer
