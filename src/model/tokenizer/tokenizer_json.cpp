#include <algorithm>
#include <map>
#include <set>

#include "core/error.h"
#include "model/json_text.h"
#include "model/tokenizer/byte_alphabet.h"
#include "model/tokenizer/tokenizer_data.h"
#include "model/tokenizer/tokenizer_fields.h"
#include "model/tokenizer/tokenizer_steps.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxId = (1 << 22) - 1;
constexpr std::int64_t kMaxGaps = 1 << 16;  // ids without a token
constexpr std::size_t kMaxTokenBytes = 1 << 16;

void put_token(TokenizerData& data, std::int32_t id, const std::string& content, const Field& field) {
  if (content.size() > kMaxTokenBytes) field.fail(fmt::format("at most {} bytes", kMaxTokenBytes));
  if (data.tokens.size() <= static_cast<std::size_t>(id)) data.tokens.resize(static_cast<std::size_t>(id) + 1);
  TokenEntry& entry = data.tokens[static_cast<std::size_t>(id)];
  if (entry.known) {
    field.fail(fmt::format("an id of its own: {} is that of '{}' already", id, printable(entry.content)));
  }
  entry = {true, false, content, bytes_of_token(content).value_or(content)};
  data.ids.emplace(content, id);
}

void read_vocab(TokenizerData& data, const Field& vocab) {
  if (!vocab.json().is_object()) vocab.fail("an object of token → id");
  const std::int64_t highest = std::min(kMaxId, static_cast<std::int64_t>(vocab.json().size()) + kMaxGaps);
  for (const auto& [content, id] : vocab.json().items()) {
    const Field field(id, fmt::format("{}[\"{}\"]", vocab.place(), printable(content)));
    put_token(data, static_cast<std::int32_t>(field.integer(0, highest)), content, field);
  }
}

/// Some models never saw some bytes (control characters, those that UTF-8 has no use for). Without an unk_token the
/// reference passes over them, and so is done here; a vocabulary without letters and the space is of another kind.
bool may_be_missing(std::size_t byte) { return (byte < 0x20 && byte != '\n') || byte > 0x7e; }

std::array<std::int32_t, 256> byte_ids(const TokenizerData& data, const Field& vocab, bool has_unknown) {
  std::array<std::int32_t, 256> ids{};
  for (std::size_t byte = 0; byte < 256; ++byte) {
    const std::string& token = byte_characters()[byte];
    const auto found = data.ids.find(token);
    if (found == data.ids.end() && (has_unknown || !may_be_missing(byte))) {
      vocab.fail(
          fmt::format("a token for every byte (it has no '{}', which stands for byte 0x{:02x}): only byte-level "
                      "vocabularies are supported",
                      token, byte));
    }
    ids[byte] = found == data.ids.end() ? BytePairEncoder::kNoToken : found->second;
  }
  return ids;
}

/// "left right", or a pair of tokens.
std::pair<std::string, std::string> merge_sides(const Field& field) {
  if (field.json().is_array()) {
    const auto sides = field.items();
    if (sides.size() != 2) field.fail("two tokens");
    return {sides[0].text(), sides[1].text()};
  }
  const std::string& text = field.text();
  const std::size_t space = text.find(' ');
  if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
    field.fail("two tokens with a space between them");
  }
  return {text.substr(0, space), text.substr(space + 1)};
}

std::vector<Merge> read_merges(const TokenizerData& data, const Field& merges) {
  std::vector<Merge> list;
  for (const Field& field : merges.items()) {
    const auto [left, right] = merge_sides(field);
    const auto id = [&](const std::string& token) {
      const auto found = data.ids.find(token);
      if (found == data.ids.end()) {
        field.fail(fmt::format("tokens of the vocabulary; '{}' is none", printable(token)));
      }
      return found->second;
    };
    if (left.empty() || right.empty()) field.fail("two tokens that are not empty");
    list.push_back({id(left), id(right), id(left + right)});
  }
  return list;
}

void read_model(TokenizerData& data, const Field& model) {
  model.only({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
              "byte_fallback", "ignore_merges", "vocab", "merges"});
  // Old files have no type. With an unk_token every byte must have a token, so that what is unknown never occurs:
  // unk_token, fuse_unk and byte_fallback change nothing.
  if (const auto type = model.find("type"); type && type->text() != "BPE") type->fail("\"BPE\"");
  for (const auto* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) model.unset(name);
  const Field vocab = model.at("vocab");
  read_vocab(data, vocab);
  const auto unknown = model.find("unk_token");
  const auto ids = byte_ids(data, vocab, unknown.has_value());
  const std::vector<Merge> merges = read_merges(data, model.at("merges"));
  std::unordered_map<std::string, std::int32_t> whole_pieces;
  if (model.flag("ignore_merges", false)) {
    for (const auto& [content, id] : data.ids)
      if (const auto bytes = bytes_of_token(content)) whole_pieces.emplace(*bytes, id);
  }
  data.encoder = BytePairEncoder(ids, merges, std::move(whole_pieces));
}

AddedToken added_token(const Field& field) {
  field.only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
  AddedToken token;
  token.id = static_cast<std::int32_t>(field.at("id").integer(0, kMaxId));
  token.content = field.at("content").text();
  if (token.content.empty()) field.at("content").fail("text that is not empty");
  token.single_word = field.flag("single_word", false);
  token.lstrip = field.flag("lstrip", false);
  token.rstrip = field.flag("rstrip", false);
  token.special = field.flag("special", false);
  token.normalized = field.flag("normalized", !token.special);
  return token;
}

/// The reference takes an added token's id from the vocabulary, or else the next free one, whatever the file says;
/// where the two differ, nobody knows what the model was trained with.
void read_added_tokens(TokenizerData& data, const Field& root) {
  const auto list = root.find("added_tokens");
  if (!list) return;
  auto next = static_cast<std::int64_t>(data.ids.size());
  std::vector<AddedToken> exact, normalized;
  std::set<std::string> seen;
  for (const Field& field : list->items()) {
    AddedToken token = added_token(field);
    if (!seen.insert(token.content).second) field.at("content").fail("a token that was not added before");
    const auto found = data.ids.find(token.content);
    const std::int64_t expected = found == data.ids.end() ? next : found->second;
    if (token.id != expected) {
      field.at("id").fail(fmt::format("{}, which '{}' has {}", expected, printable(token.content),
                                      found == data.ids.end() ? "as the next free id" : "in the vocabulary"));
    }
    if (found == data.ids.end()) put_token(data, token.id, token.content, field.at("content"));
    next = std::max(next, expected + 1);
    data.tokens[static_cast<std::size_t>(token.id)].special = token.special;
    (token.normalized ? normalized : exact).push_back(std::move(token));
  }
  data.exact_tokens = AddedTokenFinder(std::move(exact));
  data.normalized_tokens = AddedTokenFinder(std::move(normalized));
}

/// bos_token or eos_token of a tokenizer_config.json: a name, an object with its `content`, or null for none. Without
/// the field, `token` stays as it is.
void configure_token(const TokenizerData& data, const Field& config, const std::string& name,
                     std::optional<std::int32_t>& token) {
  if (!config.json().contains(name)) return;
  token.reset();
  const auto field = config.find(name);
  if (!field) return;
  const std::string& content = field->json().is_object() ? field->at("content").text() : field->text();
  const auto found = data.ids.find(content);
  if (found == data.ids.end()) field->fail("a token of the vocabulary");
  token = found->second;
}

void find_ends(TokenizerData& data, std::string_view config_text, std::string_view source) {
  std::optional<std::int32_t> separator;
  if (const auto found = data.ids.find("<|endoftext|>"); found != data.ids.end()) separator = found->second;
  data.bos = data.template_prefix.empty() ? separator : std::optional(data.template_prefix.front());
  data.eos = data.template_suffix.empty() ? separator : std::optional(data.template_suffix.back());
  if (config_text.empty()) return;
  const std::string place = fmt::format("tokenizer_config.json beside {}", source);
  const nlohmann::json json = parse_json(config_text, place);
  const Field config(json, place + ": ");
  if (!json.is_object()) config.fail("an object");
  configure_token(data, config, "bos_token", data.bos);
  configure_token(data, config, "eos_token", data.eos);
}

std::uint64_t fnv1a(std::string_view text, std::uint64_t hash) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

}  // namespace

TokenizerData parse_tokenizer(std::string_view text, std::string_view config, std::string_view source) {
  const nlohmann::json json = parse_json(text, source);
  const Field root(json, fmt::format("{}: ", source));
  root.only({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
             "decoder", "model"});
  root.unset("truncation");
  root.unset("padding");
  TokenizerData data;
  data.json = std::string(text);
  read_model(data, root.at("model"));
  read_added_tokens(data, root);
  check_normalizer(root);
  data.pre_tokenizer = read_pre_tokenizer(root);
  check_decoder(root);
  read_post_processor(data, root);
  find_ends(data, config, source);
  data.hash =
      fnv1a(fmt::format("\n{} {}", data.bos.value_or(-1), data.eos.value_or(-1)), fnv1a(text, 0xcbf29ce484222325));
  return data;
}

}  // namespace isomer
