// Trains a byte-level BPE vocabulary (Sennrich, Haddow, Birch 2016; on bytes as in GPT-2).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/tokenizer.h"
#include "model/tokenizer/added_tokens.h"
#include "model/tokenizer/pretokenizer.h"

namespace isomer {

/// <|endoftext|>: BOS, EOS and what stands between documents.
inline constexpr std::string_view kDocumentSeparator = "<|endoftext|>";

struct TokenizerTrainerOptions {
  std::int64_t vocab_size = 0;              // special tokens, 256 bytes and merges
  std::string pattern = "llama3";           // or gpt2: how a text is cut into pieces
  std::vector<std::string> special_tokens;  // beside kDocumentSeparator, which has id 0
  std::int64_t min_count = 2;               // a pair that occurs less often is not merged
  /// Called with tokens made and tokens to make, now and then.
  std::function<void(std::int64_t, std::int64_t)> progress = {};
};

/// Counts pieces as texts are added, then merges. The result depends on the texts' contents alone: of pairs with the
/// same count the one with the lower ids is merged first, as in the reference.
class TokenizerTrainer {
 public:
  /// Throws std::invalid_argument for options that can't be: a size below 256 + special tokens, an unknown pattern.
  explicit TokenizerTrainer(TokenizerTrainerOptions options);

  /// Special tokens in it divide the text and are not counted. Throws std::invalid_argument naming the offset of what
  /// isn't UTF-8.
  void add_text(std::string_view text);
  /// The tokenizer. Throws std::invalid_argument if the texts don't give that many tokens, saying how many they give.
  Tokenizer train() const;
  /// The tokenizer_config.json that goes with it.
  std::string config_json() const;

  std::int64_t num_distinct_pieces() const { return static_cast<std::int64_t>(counts_.size()); }

 private:
  std::string tokenizer_json(const std::vector<std::string>& tokens,
                             const std::vector<std::pair<std::string, std::string>>& merges) const;

  TokenizerTrainerOptions options_;
  AddedTokenFinder separators_;
  PreTokenizer pre_tokenizer_;
  std::unordered_map<std::string, std::int64_t> counts_;
};

/// Writes tokenizer.json and, where `config_json` isn't empty, tokenizer_config.json. Makes the directory. Throws
/// isomer::Error naming the file that can't be written.
void save_tokenizer(const std::filesystem::path& directory, const Tokenizer& tokenizer, std::string_view config_json);

}  // namespace isomer
