#include "model/tokenizer.h"

#include "core/error.h"
#include "model/gguf/tokenizer.h"
#include "model/json_text.h"
#include "model/tokenizer/tokenizer_data.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxFileBytes = 128 << 20;
constexpr std::int64_t kMaxConfigBytes = 16 << 20;
constexpr std::size_t kMaxCachedBytes = 64;  // longer pieces hardly ever come again

/// One call of encode: what it has seen of pieces it doesn't merge again.
class EncodeRun {
 public:
  EncodeRun(const TokenizerData& data, std::vector<std::int32_t>& ids) : data_(data), ids_(ids) {}

  void text(std::string_view text) {
    data_.exact_tokens.split(text, scratch_.pattern, [&](std::string_view part, std::optional<std::int32_t> id) {
      if (id) {
        ids_.push_back(*id);
      } else {
        between(part);
      }
    });
  }

 private:
  void between(std::string_view text) {
    data_.normalized_tokens.split(text, scratch_.pattern, [&](std::string_view part, std::optional<std::int32_t> id) {
      if (id) {
        ids_.push_back(*id);
      } else {
        data_.pre_tokenizer.run(part, scratch_, [&](std::string_view piece) { this->piece(piece); });
      }
    });
  }

  void piece(std::string_view piece) {
    if (piece.size() == 1 || piece.size() > kMaxCachedBytes) {
      data_.encoder.encode(piece, ids_);
      return;
    }
    const auto [entry, is_new] = cache_.try_emplace(piece, ids_.size(), 0);
    auto& [begin, count] = entry->second;
    if (is_new) {
      data_.encoder.encode(piece, ids_);
      count = ids_.size() - begin;
    } else {
      for (std::size_t i = 0; i < count; ++i) ids_.push_back(ids_[begin + i]);
    }
  }

  const TokenizerData& data_;
  std::vector<std::int32_t>& ids_;
  PreTokenizerScratch scratch_;
  // Piece → where its tokens stand in ids_ already. Keys point into the text or the scratch, which outlive it.
  std::unordered_map<std::string_view, std::pair<std::size_t, std::size_t>> cache_;
};

const TokenEntry* entry_of(const TokenizerData& data, std::int32_t id) {
  if (id < 0 || static_cast<std::size_t>(id) >= data.tokens.size()) return nullptr;
  const TokenEntry& entry = data.tokens[static_cast<std::size_t>(id)];
  return entry.known ? &entry : nullptr;
}

}  // namespace

TokenizerTexts Tokenizer::texts_at(const std::filesystem::path& path) {
  if (is_gguf_file(path)) return gguf_tokenizer(GgufFile(path).header());
  std::error_code code;
  const bool directory = std::filesystem::is_directory(path, code);
  const std::filesystem::path file = directory ? path / "tokenizer.json" : path;
  const std::filesystem::path config_file = file.parent_path() / "tokenizer_config.json";
  TokenizerTexts texts{.json = read_text_file(file, kMaxFileBytes)};
  if (std::filesystem::exists(config_file, code)) texts.config_json = read_text_file(config_file, kMaxConfigBytes);
  return texts;
}

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  std::error_code code;
  const bool directory = std::filesystem::is_directory(path, code);
  const TokenizerTexts texts = texts_at(path);
  return parse(texts.json, (directory ? path / "tokenizer.json" : path).string(), texts.config_json);
}

bool Tokenizer::is_at(const std::filesystem::path& path) {
  if (is_gguf_file(path)) return GgufFile(path).header().has("tokenizer.ggml.tokens");
  std::error_code code;
  return std::filesystem::is_regular_file(path / "tokenizer.json", code);
}

Tokenizer Tokenizer::parse(std::string_view json, std::string_view source, std::string_view config_json) {
  return Tokenizer(std::make_shared<const TokenizerData>(parse_tokenizer(json, config_json, source)));
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool add_special) const {
  if (const auto invalid = invalid_utf8_at(text)) {
    invalid_argument("text to tokenise: byte 0x{:02x} at offset {} is not UTF-8; mend the text, or have it replaced",
                     static_cast<unsigned char>(text[*invalid]), *invalid);
  }
  std::vector<std::int32_t> ids;
  if (add_special) ids = data_->template_prefix;
  EncodeRun(*data_, ids).text(text);
  if (add_special) ids.insert(ids.end(), data_->template_suffix.begin(), data_->template_suffix.end());
  return ids;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (const std::int32_t id : ids) {
    const TokenEntry* entry = entry_of(*data_, id);
    if (entry == nullptr) {
      invalid_argument("token id {}: the tokenizer has none with it; ids go from 0 to {}", id, vocab_size() - 1);
    }
    if (!skip_special || !entry->special) bytes += entry->bytes;
  }
  return bytes;
}

std::int64_t Tokenizer::vocab_size() const { return static_cast<std::int64_t>(data_->tokens.size()); }

std::optional<std::int32_t> Tokenizer::id_of(std::string_view token) const {
  const auto found = data_->ids.find(std::string(token));
  return found == data_->ids.end() ? std::nullopt : std::optional(found->second);
}

std::optional<std::string_view> Tokenizer::token_of(std::int32_t id) const {
  const TokenEntry* entry = entry_of(*data_, id);
  return entry == nullptr ? std::nullopt : std::optional<std::string_view>(entry->content);
}

bool Tokenizer::is_special(std::int32_t id) const {
  const TokenEntry* entry = entry_of(*data_, id);
  return entry != nullptr && entry->special;
}

std::optional<std::int32_t> Tokenizer::bos_id() const { return data_->bos; }
std::optional<std::int32_t> Tokenizer::eos_id() const { return data_->eos; }
std::uint64_t Tokenizer::hash() const { return data_->hash; }
const std::string& Tokenizer::to_json() const { return data_->json; }

}  // namespace isomer
