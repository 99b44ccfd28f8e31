#include "model/tokenizer_trainer.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "model/json_text.h"
#include "model/tokenizer/byte_alphabet.h"
#include "model/tokenizer/merge_learner.h"

namespace isomer {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMaxVocab = 1 << 20;
constexpr std::int64_t kProgressTokens = 256;

std::string_view pattern_of(const std::string& name) {
  if (name == "llama3") return kLlama3Pattern;
  if (name == "gpt2") return kGpt2Pattern;
  invalid_argument("tokenizer pattern '{}': it takes llama3 or gpt2", name);
}

/// The bytes' characters in their own order, which is that of the reference's ids too: ties are then broken alike.
std::vector<std::string> alphabet() {
  std::vector<std::string> characters(byte_characters().begin(), byte_characters().end());
  std::sort(characters.begin(), characters.end());
  return characters;
}

Json byte_level(bool use_regex) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

Json pre_tokenizer_json(const std::string& pattern) {
  if (pattern == "gpt2") return byte_level(true);
  const Json split = {
      {"type", "Split"}, {"pattern", {{"Regex", pattern_of(pattern)}}}, {"behavior", "Isolated"}, {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", Json::array({split, byte_level(false)})}};
}

/// A document begins with the separator, as in training.
Json post_processor_json() {
  const std::string separator(kDocumentSeparator);
  const Json begin = {{"SpecialToken", {{"id", separator}, {"type_id", 0}}}};
  const auto sequence = [](const char* name, int type) {
    return Json{{"Sequence", {{"id", name}, {"type_id", type}}}};
  };
  const Json token = {{"id", separator}, {"ids", Json::array({0})}, {"tokens", Json::array({separator})}};
  return {{"type", "TemplateProcessing"},
          {"single", Json::array({begin, sequence("A", 0)})},
          {"pair", Json::array({begin, sequence("A", 0), begin, sequence("B", 1)})},
          {"special_tokens", {{separator, token}}}};
}

void write_file(const std::filesystem::path& path, std::string_view text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw Error(fmt::format("{}: can't be written", path.string()));
}

}  // namespace

TokenizerTrainer::TokenizerTrainer(TokenizerTrainerOptions options) : options_(std::move(options)) {
  auto& special = options_.special_tokens;
  special.insert(special.begin(), std::string(kDocumentSeparator));
  std::vector<AddedToken> added;
  for (const std::string& token : special) {
    if (token.empty() || invalid_utf8_at(token))
      invalid_argument("special token '{}': give some text", printable(token));
    if (std::count(special.begin(), special.end(), token) > 1) {
      invalid_argument("special token '{}' is given twice, or is the document separator", printable(token));
    }
    if (bytes_of_token(token).value_or("").size() == 1) {
      invalid_argument("special token '{}' stands for a byte in the vocabulary; take another", printable(token));
    }
    added.push_back({.id = static_cast<std::int32_t>(added.size()), .content = token});
  }
  const auto smallest = static_cast<std::int64_t>(256 + special.size());
  if (options_.vocab_size < smallest || options_.vocab_size > kMaxVocab) {
    invalid_argument("a vocabulary of {} tokens: it takes {} ({} special tokens and 256 bytes) to {}",
                     options_.vocab_size, smallest, special.size(), kMaxVocab);
  }
  separators_ = AddedTokenFinder(std::move(added));
  pre_tokenizer_.add_split(Pattern(pattern_of(options_.pattern), Pattern::Kind::regex, "pattern"),
                           SplitBehavior::isolated, false);
}

void TokenizerTrainer::add_text(std::string_view text) {
  if (const auto invalid = invalid_utf8_at(text)) {
    invalid_argument("text to train on: byte 0x{:02x} at offset {} is not UTF-8; mend the text, or have it replaced",
                     static_cast<unsigned char>(text[*invalid]), *invalid);
  }
  PreTokenizerScratch scratch;
  std::unordered_map<std::string_view, std::int64_t> counts;  // of this text: no string is made for what repeats
  separators_.split(text, scratch.pattern, [&](std::string_view part, std::optional<std::int32_t> id) {
    if (id) return;
    pre_tokenizer_.run(part, scratch, [&](std::string_view piece) { ++counts[piece]; });
  });
  for (const auto& [piece, count] : counts) counts_[std::string(piece)] += count;
}

Tokenizer TokenizerTrainer::train() const {
  std::vector<std::string> tokens = options_.special_tokens;
  std::unordered_map<std::string, std::int32_t> ids;
  std::array<std::int32_t, 256> byte_ids{};
  for (const std::string& character : alphabet()) {
    const auto id = static_cast<std::int32_t>(tokens.size());
    byte_ids[static_cast<unsigned char>(bytes_of_token(character)->front())] = id;
    tokens.push_back(character);
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) ids.emplace(tokens[i], static_cast<std::int32_t>(i));

  std::vector<CountedPiece> pieces;
  for (const auto& [piece, count] : counts_) {
    CountedPiece counted{{}, count};
    for (const char byte : piece) counted.tokens.push_back(byte_ids[static_cast<unsigned char>(byte)]);
    pieces.push_back(std::move(counted));
  }
  MergeLearner learner(std::move(pieces), options_.min_count);
  std::vector<std::pair<std::string, std::string>> merges;
  MergeLearner::Pair pair;
  while (static_cast<std::int64_t>(tokens.size()) < options_.vocab_size) {
    if (!learner.next(pair)) {
      invalid_argument("a vocabulary of {} tokens: the text gives {}; ask for fewer, or give more text",
                       options_.vocab_size, tokens.size());
    }
    const std::string left = tokens[static_cast<std::size_t>(pair.first)];
    const std::string right = tokens[static_cast<std::size_t>(pair.second)];
    // Two ways to the same bytes are one token.
    const auto [entry, is_new] = ids.try_emplace(left + right, static_cast<std::int32_t>(tokens.size()));
    if (is_new) tokens.push_back(left + right);
    merges.emplace_back(left, right);
    learner.merge(pair, entry->second);
    if (options_.progress && merges.size() % kProgressTokens == 0) {
      options_.progress(static_cast<std::int64_t>(tokens.size()), options_.vocab_size);
    }
  }
  return Tokenizer::parse(tokenizer_json(tokens, merges), "the trained tokenizer", config_json());
}

std::string TokenizerTrainer::tokenizer_json(const std::vector<std::string>& tokens,
                                             const std::vector<std::pair<std::string, std::string>>& merges) const {
  Json added = Json::array(), vocab = Json::object(), merge_list = Json::array();
  for (std::size_t i = 0; i < options_.special_tokens.size(); ++i) {
    added.push_back({{"id", i},
                     {"content", options_.special_tokens[i]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  // Straight into the underlying list: operator[] searches it from the start.
  auto& members = vocab.get_ref<Json::object_t&>();
  for (std::size_t i = 0; i < tokens.size(); ++i) members.emplace_back(tokens[i], i);
  for (const auto& [left, right] : merges) merge_list.push_back(Json::array({left, right}));
  Json model = {{"type", "BPE"},
                {"dropout", nullptr},
                {"unk_token", nullptr},
                {"continuing_subword_prefix", nullptr},
                {"end_of_word_suffix", nullptr},
                {"fuse_unk", false},
                {"byte_fallback", false},
                {"ignore_merges", false},
                {"vocab", std::move(vocab)},
                {"merges", std::move(merge_list)}};
  const Json root = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", std::move(added)},
                     {"normalizer", nullptr},
                     {"pre_tokenizer", pre_tokenizer_json(options_.pattern)},
                     {"post_processor", post_processor_json()},
                     {"decoder", byte_level(true)},
                     {"model", std::move(model)}};
  return root.dump(1) + "\n";
}

std::string TokenizerTrainer::config_json() const {
  const Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                       {"bos_token", kDocumentSeparator},
                       {"eos_token", kDocumentSeparator},
                       {"clean_up_tokenization_spaces", false}};
  return config.dump(1) + "\n";
}

void save_tokenizer(const std::filesystem::path& directory, const Tokenizer& tokenizer, std::string_view config_json) {
  std::error_code code;
  std::filesystem::create_directories(directory, code);
  if (code) throw Error(fmt::format("{}: can't be made a directory: {}", directory.string(), code.message()));
  write_file(directory / "tokenizer.json", tokenizer.to_json());
  if (!config_json.empty()) write_file(directory / "tokenizer_config.json", config_json);
}

}  // namespace isomer
