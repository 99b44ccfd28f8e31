// isomer eval ngram: interpolated Kneser–Ney over bytes, and a bigram of a tokenizer's tokens.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "apps/isomer/eval.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "core/error.h"
#include "core/record.h"
#include "eval/ngram.h"
#include "model/tokenizer.h"
#include "study/machine.h"
#include "train/run_directory.h"
#include "train/token_file.h"

namespace isomer {

namespace {

using nlohmann::json;

struct NgramArguments {
  std::vector<std::string> train, data;
  std::string tokenizer, json_file;
  int order = 5;
};

/// Texts as symbols, a vector a document.
struct SymbolTexts {
  std::vector<std::vector<std::int32_t>> documents;
  std::int64_t num_bytes = 0;

  std::vector<NgramModel::Symbols> spans() const { return {documents.begin(), documents.end()}; }
};

SymbolTexts bytes_of(const std::vector<std::string>& paths) {
  SymbolTexts result;
  for (const std::string& path : paths) {
    const std::string text = read_utf8_text(path);
    for (const std::string_view document : split_documents(text)) {
      auto& symbols = result.documents.emplace_back();
      for (const char c : document) symbols.push_back(static_cast<unsigned char>(c));
      result.num_bytes += static_cast<std::int64_t>(document.size());
    }
  }
  return result;
}

SymbolTexts tokens_of(const std::vector<std::string>& paths, const Tokenizer& tokenizer) {
  const TokenDataset data = TokenDataset::from_text({paths.begin(), paths.end()}, tokenizer);
  SymbolTexts result{.num_bytes = data.num_text_bytes()};
  for (std::int64_t d = 0; d < data.num_documents(); ++d) {
    const std::int64_t begin = data.document_begin(d), end = data.document_begin(d + 1);
    data.read(begin, result.documents.emplace_back(static_cast<std::size_t>(end - begin)));
  }
  return result;
}

/// Trains and scores one model; its row of the table, its entry in the JSON.
json measure(const std::string& name, const SymbolTexts& train, const SymbolTexts& held_out,
             const NgramOptions& options, std::int64_t skip) {
  const double begin = wall_clock_s();
  const NgramModel model(train.spans(), options);
  const double trained = wall_clock_s();
  double bits = 0;
  std::int64_t scored = 0;
  for (const auto& document : held_out.documents) {
    bits += model.bits(document, skip);
    scored += std::max<std::int64_t>(0, static_cast<std::int64_t>(document.size()) - skip);
  }
  if (scored == 0) invalid_argument("--data: no symbol to score in it; give more text");
  const auto& discounts = model.discounts(options.order);
  return {{"name", name},
          {"order", options.order},
          {"vocab_size", options.vocab_size},
          {"grams", model.num_grams(options.order)},
          {"discounts", discounts},
          {"symbols_scored", scored},
          {"perplexity", std::exp2(bits / static_cast<double>(scored))},
          {"bits_per_byte", bits / static_cast<double>(held_out.num_bytes)},
          {"seconds_training", trained - begin},
          {"seconds_scoring", wall_clock_s() - trained}};
}

int run_ngram(const NgramArguments& a) {
  Progress progress;
  progress.show(fmt::format("{}-gram of bytes", a.order));
  json models = json::array();
  const SymbolTexts train = bytes_of(a.train), held_out = bytes_of(a.data);
  models.push_back(
      measure(fmt::format("{}-gram of bytes", a.order), train, held_out, {.order = a.order, .vocab_size = 256}, 0));
  if (!a.tokenizer.empty()) {
    progress.show("bigram of tokens");
    const Tokenizer tokenizer = Tokenizer::load(a.tokenizer);
    models.push_back(measure("bigram of tokens", tokens_of(a.train, tokenizer), tokens_of(a.data, tokenizer),
                             {.order = 2, .vocab_size = tokenizer.vocab_size()}, 1));
  }
  progress.show("");
  Table table({"interpolated Kneser-Ney", "bits/byte", "perplexity", "different grams", "trained in"});
  for (const json& m : models) {
    table.add({m["name"].get<std::string>(), fmt::format("{:.4f}", m["bits_per_byte"].get<double>()),
               fmt::format("{:.2f}", m["perplexity"].get<double>()), fmt::format("{}", m["grams"].get<std::int64_t>()),
               format_seconds(m["seconds_training"].get<double>())});
  }
  fmt::print("{}", table.text());
  fmt::print("trained on {} ({}), scored on {} ({}); perplexity a byte or a token.\n", fmt::join(a.train, ", "),
             format_bytes(static_cast<double>(train.num_bytes)), fmt::join(a.data, ", "),
             format_bytes(static_cast<double>(held_out.num_bytes)));
  if (a.json_file.empty()) return 0;
  json result = machine_json(1, 0);
  result.update({{"command", "eval ngram"},
                 {"train", a.train},
                 {"data", a.data},
                 {"train_bytes", train.num_bytes},
                 {"data_bytes", held_out.num_bytes},
                 {"models", models}});
  write_text_atomically(a.json_file, result.dump(2) + "\n");
  return 0;
}

}  // namespace

void add_eval_ngram(CLI::App& eval, int& exit_code) {
  auto a = std::make_shared<NgramArguments>();
  CLI::App* command = eval.add_subcommand("ngram", "bits per byte of n-gram models: what a language model must beat");
  command->add_option("--train", a->train, "text files to count; lines <|endoftext|> end a document")->required();
  command->add_option("--data", a->data, "held-out text files to score")->required();
  command->add_option("--order", a->order, "n: a byte is predicted from the n - 1 before it")
      ->check(CLI::Range(1, 7))
      ->capture_default_str();
  command->add_option("--tokenizer", a->tokenizer, "tokenizer.json or its directory: a bigram of its tokens too");
  command->add_option("--json", a->json_file, "write the same as JSON");
  command->callback([a, &exit_code] { exit_code = run_ngram(*a); });
}

}  // namespace isomer
