#include "model/gguf/tokenizer.h"

#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "model/json_text.h"
#include "model/tokenizer/pretokenizer.h"

namespace isomer {

namespace {

using Json = nlohmann::ordered_json;

// Kinds of tokens, as tokenizer.ggml.token_type numbers them; normal (1), unused (5) and byte (6) need no word here.
constexpr std::int64_t kUnknown = 2, kControl = 3, kUserDefined = 4;
constexpr std::int64_t kMaxKind = 6;

constexpr const char* kTokensKey = "tokenizer.ggml.tokens";
constexpr const char* kPreKey = "tokenizer.ggml.pre";

Json byte_level(bool use_regex) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
}
Json split(std::string_view regex) {
  return {{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}, {"invert", false}};
}
Json sequence(Json steps) { return {{"type", "Sequence"}, {"pretokenizers", std::move(steps)}}; }

/// How a text is cut before merging, by the name that the file gives it.
Json pre_tokenizer_json(const GgufHeader& header) {
  const std::string& name = header.text(kPreKey);
  if (name == "gpt-2" || name == "gpt2") return byte_level(true);
  if (name == "smollm") {
    return sequence(Json::array({{{"type", "Digits"}, {"individual_digits", true}}, byte_level(true)}));
  }
  if (name == "llama-bpe" || name == "llama3") {
    return sequence(Json::array({split(kLlama3Pattern), byte_level(false)}));
  }
  if (name == "deepseek-v3") {
    constexpr std::string_view kLast =
        R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
    return sequence(Json::array({split(R"(\p{N}{1,3})"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
                                 split(kLast), byte_level(false)}));
  }
  header.wrong(kPreKey, fmt::format("\"{}\": expected gpt-2, smollm, llama-bpe or deepseek-v3; give the model's own "
                                    "tokenizer.json with --tokenizer",
                                    printable(name)));
}

bool is_llama3(const GgufHeader& header) {
  const std::string& name = header.text(kPreKey);
  return name == "llama-bpe" || name == "llama3";
}

void check_tokens(const GgufHeader& header) {
  std::set<std::string_view> seen;
  for (const auto& token : header.texts(kTokensKey)) {
    if (token.empty() || invalid_utf8_at(token)) {
      header.wrong(kTokensKey, fmt::format("token {} is empty or not UTF-8", seen.size()));
    }
    if (!seen.insert(token).second) {
      header.wrong(kTokensKey, fmt::format("token '{}' stands twice", printable(token)));
    }
  }
}

Json vocabulary_json(const GgufHeader& header) {
  Json vocabulary = Json::object();
  auto& members = vocabulary.get_ref<Json::object_t&>();  // operator[] would search it from the start
  for (const auto& token : header.texts(kTokensKey)) members.emplace_back(token, members.size());
  return vocabulary;
}

Json merges_json(const GgufHeader& header) {
  constexpr const char* kKey = "tokenizer.ggml.merges";
  Json merges = Json::array();
  for (const auto& merge : header.texts(kKey)) {
    // The space between them, not one that a token begins with.
    const auto space = merge.find(' ', 1);
    if (space == std::string::npos || invalid_utf8_at(merge)) {
      header.wrong(kKey, fmt::format("merge {}, '{}': expected two tokens with a space between them", merges.size(),
                                     printable(merge)));
    }
    merges.push_back(Json::array({merge.substr(0, space), merge.substr(space + 1)}));
  }
  return merges;
}

Json added_tokens_json(const GgufHeader& header) {
  constexpr const char* kKey = "tokenizer.ggml.token_type";
  const auto& tokens = header.texts(kTokensKey);
  Json added = Json::array();
  if (!header.has(kKey)) return added;
  const auto& kinds = header.integers(kKey);
  if (kinds.size() != tokens.size()) {
    header.wrong(kKey, fmt::format("{} of them for {} tokens", kinds.size(), tokens.size()));
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (kinds[i] < 0 || kinds[i] > kMaxKind)
      header.wrong(kKey, fmt::format("{}: expected 0 to {}", kinds[i], kMaxKind));
    if (kinds[i] != kControl && kinds[i] != kUserDefined && kinds[i] != kUnknown) continue;
    added.push_back({{"id", i},
                     {"content", tokens[i]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", kinds[i] != kUserDefined}});
  }
  return added;
}

std::optional<std::size_t> token_id(const GgufHeader& header, std::string_view key) {
  if (!header.has(key)) return std::nullopt;
  const auto size = static_cast<std::int64_t>(header.texts(kTokensKey).size());
  return static_cast<std::size_t>(header.integer(key, 0, std::max<std::int64_t>(size - 1, 0)));
}

constexpr const char* kBosKey = "tokenizer.ggml.bos_token_id";
constexpr const char* kEosKey = "tokenizer.ggml.eos_token_id";

/// BOS and EOS around a text where the file asks for them.
Json post_processor_json(const GgufHeader& header) {
  const auto& tokens = header.texts(kTokensKey);
  Json single = Json::array(), special = Json::object();
  const auto put = [&](const char* flag, bool absent, const char* id_key) {
    const auto id = token_id(header, id_key);
    if (!header.flag_or(flag, absent) || !id) return;
    const std::string& name = tokens[*id];
    single.push_back({{"SpecialToken", {{"id", name}, {"type_id", 0}}}});
    special[name] = {{"id", name}, {"ids", Json::array({*id})}, {"tokens", Json::array({name})}};
  };
  put("tokenizer.ggml.add_bos_token", is_llama3(header), kBosKey);
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  put("tokenizer.ggml.add_eos_token", false, kEosKey);
  if (single.size() == 1) return nullptr;
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", single}, {"special_tokens", special}};
}

std::string config_json(const GgufHeader& header) {
  const auto& tokens = header.texts(kTokensKey);
  Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
  const auto put = [&](const char* name, const char* key) {
    if (const auto id = token_id(header, key)) {
      config[name] = tokens[*id];
    } else {
      config[name] = nullptr;
    }
  };
  put("bos_token", kBosKey);
  put("eos_token", kEosKey);
  constexpr const char* kChatKey = "tokenizer.chat_template";
  if (header.has(kChatKey)) {
    const std::string& chat = header.text(kChatKey);
    if (invalid_utf8_at(chat)) header.wrong(kChatKey, "it is not UTF-8");
    config["chat_template"] = chat;
  }
  return config.dump(1) + "\n";
}

}  // namespace

TokenizerTexts gguf_tokenizer(const GgufHeader& header) {
  constexpr const char* kModelKey = "tokenizer.ggml.model";
  const std::string& model = header.text(kModelKey);
  if (model != "gpt2") {
    header.wrong(kModelKey, fmt::format("\"{}\": expected gpt2, byte-level BPE", printable(model)));
  }
  if (header.flag_or("tokenizer.ggml.add_space_prefix", false)) {
    header.wrong("tokenizer.ggml.add_space_prefix", "true: expected false");
  }
  check_tokens(header);
  Json bpe = {{"type", "BPE"},
              {"dropout", nullptr},
              {"unk_token", nullptr},
              {"continuing_subword_prefix", nullptr},
              {"end_of_word_suffix", nullptr},
              {"fuse_unk", false},
              {"byte_fallback", false},
              {"ignore_merges", is_llama3(header)},
              {"vocab", vocabulary_json(header)},
              {"merges", merges_json(header)}};
  const Json root = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", added_tokens_json(header)},
                     {"normalizer", nullptr},
                     {"pre_tokenizer", pre_tokenizer_json(header)},
                     {"post_processor", post_processor_json(header)},
                     {"decoder", byte_level(true)},
                     {"model", std::move(bpe)}};
  return {.json = root.dump(1) + "\n", .config_json = config_json(header)};
}

}  // namespace isomer
