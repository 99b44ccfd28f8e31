// Tokens of a corpus with the borders of its documents, in memory or mapped from a file (docs/tokenizer.md has the
// format). A file is hostile until opened: sizes, borders and every id are checked.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/tokenizer.h"

namespace isomer {

struct TextOptions {
  /// Lines that consist of <|endoftext|> end a document. A file's end always does.
  bool split_at_separator = true;
  /// Replace what isn't UTF-8 by U+FFFD; otherwise it is an error that names file and offset.
  bool lossy = false;
  /// Called with bytes done and bytes in all, a few times a second.
  std::function<void(std::int64_t, std::int64_t)> progress = {};
};

/// The text of a file. Throws isomer::Error naming it: unreadable, empty, not UTF-8 (with the offset; `lossy`
/// replaces).
std::string read_utf8_text(const std::filesystem::path& path, bool lossy = false);
/// What lies between lines that are <|endoftext|>, views of `text`; with no such line, all of it.
std::vector<std::string_view> split_documents(std::string_view text);

/// Immutable; copies share the tokens.
class TokenDataset {
 public:
  /// Tokenises text files. Each document begins with the tokenizer's BOS and ends with its EOS, where it has them.
  /// Documents without text are left out. Throws isomer::Error naming the file: unreadable, empty, not UTF-8.
  static TokenDataset from_text(const std::vector<std::filesystem::path>& paths, const Tokenizer& tokenizer,
                                const TextOptions& options = {});
  /// Maps a token file, read-only. Throws isomer::Error with file, field and value for anything that is not one.
  static TokenDataset open(const std::filesystem::path& path);
  /// Whether a file begins as token files do.
  static bool is_token_file(const std::filesystem::path& path);
  /// Each inner vector is a document, as it stands. Throws std::invalid_argument for ids outside [0, vocab_size).
  static TokenDataset from_tokens(const std::vector<std::vector<std::int32_t>>& documents, std::int64_t vocab_size,
                                  std::uint64_t tokenizer_hash = 0, std::int64_t num_text_bytes = 0);

  /// Writes to a new file beside `path` and renames it, so that `path` is never half a file.
  void save(const std::filesystem::path& path) const;

  std::int64_t num_tokens() const;
  std::int64_t num_documents() const;
  std::int64_t vocab_size() const;
  /// Tokenizer::hash of what made the tokens; 0 where unknown.
  std::uint64_t tokenizer_hash() const;
  /// Bytes of text behind the tokens, separators not counted; what bits per byte divide by. 0 where unknown.
  std::int64_t num_text_bytes() const;
  /// Tokens [begin, begin + out.size()). Throws std::invalid_argument beyond the end.
  void read(std::int64_t begin, std::span<std::int32_t> out) const;
  /// First token of document i, i in [0, num_documents]; the last entry is num_tokens.
  std::int64_t document_begin(std::int64_t i) const;
  /// The document that holds a token.
  std::int64_t document_of(std::int64_t token) const;

 private:
  friend class TokenDatasetBuilder;
  struct Storage;
  explicit TokenDataset(std::shared_ptr<const Storage> storage) : storage_(std::move(storage)) {}
  std::shared_ptr<const Storage> storage_;
};

}  // namespace isomer
