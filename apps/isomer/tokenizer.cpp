// isomer tokenizer: trains a byte-level BPE tokenizer; turns text into tokens and back.
#include "model/tokenizer.h"

#include <fmt/ranges.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "apps/isomer/commands.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "core/error.h"
#include "model/json_text.h"
#include "model/text.h"
#include "model/tokenizer_trainer.h"
#include "study/machine.h"
#include "train/token_file.h"

namespace isomer {

namespace {

using nlohmann::json;

struct TokenizerArguments {
  std::vector<std::string> data, special;
  std::string tokenizer, out, json_file, ids_file = "-", pattern = "llama3", vocab_size = "2048";
  std::int64_t min_count = 2;
  bool lossy = false, add_special = false, skip_special = false;
};

std::string text_of(const std::string& path, bool lossy) {
  std::string text = load_text_bytes(path);
  const auto invalid = invalid_utf8_at(text);
  if (!invalid) return text;
  if (lossy) return replace_invalid_utf8(text);
  throw Error(fmt::format("{}: byte 0x{:02x} at offset {} is not UTF-8; mend the file, or pass --lossy", path,
                          static_cast<unsigned char>(text[*invalid]), *invalid));
}

void write_json(const std::string& file, const json& content) {
  std::ofstream out(file);
  out << content.dump(2) << "\n";
  out.close();
  if (!out) throw Error(fmt::format("--json {}: can't be written", file));
}

json described(const Tokenizer& tokenizer, const char* command) {
  const auto id = [](std::optional<std::int32_t> token) { return token ? json(*token) : json(nullptr); };
  json result = machine_json(1, 0);
  result["command"] = command;
  result["vocab_size"] = tokenizer.vocab_size();
  result["bos_id"] = id(tokenizer.bos_id());
  result["eos_id"] = id(tokenizer.eos_id());
  result["hash"] = fmt::format("{:016x}", tokenizer.hash());
  return result;
}

/// A figure of a text: its bytes, its tokens, and what one token is worth.
void add_text_figures(json& result, std::int64_t bytes, std::int64_t tokens) {
  result["text_bytes"] = bytes;
  result["text_tokens"] = tokens;
  result["bytes_per_token"] =
      tokens > 0 ? json(static_cast<double>(bytes) / static_cast<double>(tokens)) : json(nullptr);
}

std::string named(const Tokenizer& tokenizer, std::optional<std::int32_t> id) {
  return id ? fmt::format("{} {}", *id, printable(tokenizer.token_of(*id).value_or(""))) : "none";
}

void print_table(const json& result, const Tokenizer& tokenizer) {
  Table table({"tokenizer", ""});
  table.add({"vocabulary", fmt::format("{}", tokenizer.vocab_size())});
  table.add({"BOS", named(tokenizer, tokenizer.bos_id())});
  table.add({"EOS", named(tokenizer, tokenizer.eos_id())});
  table.add({"hash", result["hash"].get<std::string>()});
  table.add({"text", format_bytes(result["text_bytes"].get<double>())});
  table.add({"tokens of it", fmt::format("{}", result["text_tokens"].get<std::int64_t>())});
  if (!result["bytes_per_token"].is_null()) {
    table.add({"bytes a token", fmt::format("{:.3f}", result["bytes_per_token"].get<double>())});
  }
  fmt::print("{}", table.text());
}

int run_train(const TokenizerArguments& a) {
  Progress progress;
  TokenizerTrainer trainer({.vocab_size = parse_count("--vocab-size", a.vocab_size, 257, 1 << 20),
                            .pattern = a.pattern,
                            .special_tokens = a.special,
                            .min_count = a.min_count,
                            .progress = [&](std::int64_t done, std::int64_t all) {
                              progress.show(fmt::format("merging: {} of {} tokens", done, all));
                            }});
  std::int64_t bytes = 0;
  for (const std::string& path : a.data) {
    progress.show(fmt::format("counting {}", path));
    const std::string text = text_of(path, a.lossy);
    bytes += static_cast<std::int64_t>(text.size());
    trainer.add_text(text);
  }
  const Tokenizer tokenizer = trainer.train();
  save_tokenizer(a.out, tokenizer, trainer.config_json());
  std::int64_t tokens = 0;
  for (const std::string& path : a.data) {
    progress.show(fmt::format("tokens of {}", path));
    tokens += static_cast<std::int64_t>(tokenizer.encode(text_of(path, a.lossy)).size());
  }
  progress.show("");
  json result = described(tokenizer, "tokenizer train");
  result["pattern"] = a.pattern;
  result["distinct_pieces"] = trainer.num_distinct_pieces();
  add_text_figures(result, bytes, tokens);
  print_table(result, tokenizer);
  fmt::print("written to {}: tokenizer.json, tokenizer_config.json\n", a.out);
  if (!a.json_file.empty()) write_json(a.json_file, result);
  return 0;
}

/// To a token file.
int run_encode_to_file(const TokenizerArguments& a, const Tokenizer& tokenizer) {
  Progress progress;
  TextOptions options{.lossy = a.lossy};
  options.progress = [&](std::int64_t done, std::int64_t all) {
    progress.show(fmt::format("tokens: {} of {}", format_bytes(static_cast<double>(done)),
                              format_bytes(static_cast<double>(all))));
  };
  const TokenDataset dataset = TokenDataset::from_text({a.data.begin(), a.data.end()}, tokenizer, options);
  dataset.save(a.out);
  progress.show("");
  json result = described(tokenizer, "tokenizer encode");
  add_text_figures(result, dataset.num_text_bytes(), dataset.num_tokens());
  result["documents"] = dataset.num_documents();
  print_table(result, tokenizer);
  fmt::print("written to {}: {} documents\n", a.out, dataset.num_documents());
  if (!a.json_file.empty()) write_json(a.json_file, result);
  return 0;
}

/// To the terminal, a line a file.
int run_encode(const TokenizerArguments& a) {
  const Tokenizer tokenizer = Tokenizer::load(a.tokenizer);
  if (!a.out.empty()) return run_encode_to_file(a, tokenizer);
  json result = described(tokenizer, "tokenizer encode");
  result["ids"] = json::array();
  std::int64_t bytes = 0, tokens = 0;
  for (const std::string& path : a.data) {
    const std::string text = text_of(path, a.lossy);
    const auto ids = tokenizer.encode(text, a.add_special);
    bytes += static_cast<std::int64_t>(text.size());
    tokens += static_cast<std::int64_t>(ids.size());
    fmt::print("{}\n", fmt::join(ids, " "));
    result["ids"].push_back(ids);
  }
  add_text_figures(result, bytes, tokens);
  if (!a.json_file.empty()) write_json(a.json_file, result);
  return 0;
}

int run_decode(const TokenizerArguments& a) {
  const Tokenizer tokenizer = Tokenizer::load(a.tokenizer);
  std::ifstream file;
  if (a.ids_file != "-") {
    file.open(a.ids_file);
    if (!file) throw Error(fmt::format("--ids {}: can't be read", a.ids_file));
  }
  std::istream& in = a.ids_file == "-" ? std::cin : file;
  std::vector<std::int32_t> ids;
  for (std::string word; in >> word;) {
    ids.push_back(static_cast<std::int32_t>(parse_count("--ids", word, 0, (std::int64_t{1} << 31) - 1)));
  }
  const std::string bytes = tokenizer.decode(ids, a.skip_special);
  std::fwrite(bytes.data(), 1, bytes.size(), stdout);
  return 0;
}

int run_info(const TokenizerArguments& a) {
  const Tokenizer tokenizer = Tokenizer::load(a.tokenizer);
  json result = described(tokenizer, "tokenizer info");
  const std::string text = a.data.empty() ? std::string(default_text()) : text_of(a.data.front(), a.lossy);
  const auto begin = std::chrono::steady_clock::now();
  const auto ids = tokenizer.encode(text);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  add_text_figures(result, static_cast<std::int64_t>(text.size()), static_cast<std::int64_t>(ids.size()));
  result["bytes_per_second"] = static_cast<double>(text.size()) / seconds.count();
  const bool round_trip = tokenizer.decode(ids) == text;
  result["round_trip"] = round_trip;
  print_table(result, tokenizer);
  fmt::print("encoded at {}/s; decoded again it is {}\n", format_bytes(result["bytes_per_second"].get<double>()),
             round_trip ? "the same text" : "ANOTHER text");
  if (!a.json_file.empty()) write_json(a.json_file, result);
  return round_trip ? 0 : 1;
}

CLI::App* add_action(CLI::App& parent, const std::string& name, const std::string& help, int& exit_code,
                     const std::shared_ptr<TokenizerArguments>& a, int (*run)(const TokenizerArguments&)) {
  CLI::App* action = parent.add_subcommand(name, help);
  action->callback([a, run, &exit_code] { exit_code = run(*a); });
  if (name != "decode") {
    action->add_option("--json", a->json_file, "write the same as JSON");
    action->add_flag("--lossy", a->lossy, "replace what isn't UTF-8 by U+FFFD");
  }
  if (name != "train") {
    action->add_option("--tokenizer", a->tokenizer, "tokenizer.json, or a directory with one")->required();
  }
  return action;
}

}  // namespace

void add_tokenizer(CLI::App& app, int& exit_code) {
  auto a = std::make_shared<TokenizerArguments>();
  CLI::App* command = app.add_subcommand("tokenizer", "train a byte-level BPE tokenizer; text to tokens and back");
  command->require_subcommand(1);

  CLI::App* train = add_action(*command, "train", "make a tokenizer.json from text", exit_code, a, run_train);
  train->add_option("--data", a->data, "text files")->required();
  train->add_option("--vocab-size", a->vocab_size, "tokens, the special ones and 256 bytes among them")
      ->capture_default_str();
  train->add_option("--out", a->out, "directory to write to")->required();
  train->add_option("--pattern", a->pattern, "how text is cut before merging")
      ->check(CLI::IsMember({"llama3", "gpt2"}))
      ->capture_default_str();
  train->add_option("--special", a->special, "special tokens beside <|endoftext|>");
  train->add_option("--min-count", a->min_count, "pairs that occur less often are not merged")
      ->check(CLI::Range(1, 1 << 30))
      ->capture_default_str();

  CLI::App* encode = add_action(*command, "encode", "token ids of text files, a line each", exit_code, a, run_encode);
  encode->add_option("--data", a->data, "text files")->required();
  encode->add_option("--out", a->out, "write a token file instead");
  encode->add_flag("--add-special", a->add_special, "with what the post-processor adds, BOS say");

  CLI::App* decode = add_action(*command, "decode", "the text of token ids", exit_code, a, run_decode);
  decode->add_option("--ids", a->ids_file, "file of ids with blanks between; - is the standard input")
      ->capture_default_str();
  decode->add_flag("--skip-special", a->skip_special, "leave special tokens out");

  CLI::App* info = add_action(*command, "info", "what a tokenizer is, and its speed", exit_code, a, run_info);
  info->add_option("--data", a->data, "text to measure on; default the novel in data/text")->expected(1);
}

}  // namespace isomer
