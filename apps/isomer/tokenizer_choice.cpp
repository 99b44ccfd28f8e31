#include "apps/isomer/tokenizer_choice.h"

#include <algorithm>

#include "core/error.h"

namespace isomer {

namespace {

std::string shown(const Tokenizer& tokenizer, std::int32_t id) {
  const auto token = tokenizer.token_of(id);
  return token ? fmt::format("'{}'", *token) : "no token";
}

void check_same_ids(const std::string& path, const Tokenizer& asked, const std::string& model, const Tokenizer& own) {
  if (asked.hash() == own.hash()) return;
  const auto most = static_cast<std::int32_t>(std::max(asked.vocab_size(), own.vocab_size()));
  for (std::int32_t id = 0; id < most; ++id) {
    if (asked.token_of(id) == own.token_of(id)) continue;
    invalid_argument(
        "--tokenizer {}: its id {} is {}, that of {}'s own tokenizer.json {}: the model would read "
        "nonsense; leave --tokenizer out, or take one of the same vocabulary",
        path, id, shown(asked, id), model, shown(own, id));
  }
}

}  // namespace

Tokenizer choose_tokenizer(const std::string& path, const std::string& model, const std::string& directory) {
  const bool has_own = Tokenizer::is_at(directory);
  if (path.empty()) {
    if (!has_own) invalid_argument("--model {}: it has no tokenizer.json; name one with --tokenizer", model);
    return Tokenizer::load(directory);
  }
  Tokenizer asked = Tokenizer::load(path);
  if (has_own) check_same_ids(path, asked, model, Tokenizer::load(directory));
  return asked;
}

std::vector<std::int32_t> bytes_of_tokens(const Tokenizer& tokenizer) {
  std::vector<std::int32_t> bytes(static_cast<std::size_t>(tokenizer.vocab_size()), 0);
  for (std::int32_t id = 0; id < static_cast<std::int32_t>(bytes.size()); ++id) {
    if (!tokenizer.token_of(id) || tokenizer.is_special(id)) continue;
    bytes[static_cast<std::size_t>(id)] = static_cast<std::int32_t>(tokenizer.decode({&id, 1}).size());
  }
  return bytes;
}

}  // namespace isomer
