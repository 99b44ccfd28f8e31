// What a tokenizer.json comes to, behind Tokenizer.
#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "model/tokenizer/added_tokens.h"
#include "model/tokenizer/bpe.h"
#include "model/tokenizer/pretokenizer.h"

namespace isomer {

struct TokenEntry {
  bool known = false;    // ids may have gaps
  bool special = false;  // left out by decode(skip_special)
  std::string content;   // as in the file
  std::string bytes;     // what it decodes to
};

struct TokenizerData {
  std::string json;
  std::uint64_t hash = 0;
  std::vector<TokenEntry> tokens;  // by id
  std::unordered_map<std::string, std::int32_t> ids;
  AddedTokenFinder exact_tokens, normalized_tokens;  // the former are looked for first
  PreTokenizer pre_tokenizer;
  BytePairEncoder encoder;
  std::vector<std::int32_t> template_prefix, template_suffix;  // what the post-processor puts around a text
  std::optional<std::int32_t> bos, eos;
};

/// Parses tokenizer.json, and tokenizer_config.json where `config` isn't empty. Throws isomer::Error beginning with
/// `source` and naming field and value.
TokenizerData parse_tokenizer(std::string_view json, std::string_view config, std::string_view source);

}  // namespace isomer
