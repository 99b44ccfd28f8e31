#include "apps/isomer/train_setup.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "apps/isomer/units.h"
#include "model/checkpoint.h"
#include "model/gguf.h"
#include "model/json_text.h"
#include "model/model_weights.h"
#include "sharding/sequence_layout.h"

namespace isomer {

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxTokenizerBytes = 256 << 20;

// Beside run.json, written with it.
constexpr std::string_view kTokenizerFile = "run-tokenizer.json";
constexpr std::string_view kTokenizerConfigFile = "run-tokenizer-config.json";
constexpr std::string_view kTokensFile = "tokens.bin";
constexpr std::string_view kEvalTokensFile = "eval_tokens.bin";

std::string text_if_there(const fs::path& file) {
  std::error_code code;
  return fs::is_regular_file(file, code) ? read_text_file(file, kMaxTokenizerBytes) : std::string();
}

/// tokenizer.json itself: --tokenizer (a file, or its directory), or what lies beside the configuration; or a GGUF
/// file.
fs::path tokenizer_file(const TrainArguments& a) {
  fs::path path = a.tokenizer.empty() ? fs::path(a.config) : fs::path(a.tokenizer);
  std::error_code code;
  if ((!a.tokenizer.empty() && fs::is_regular_file(path, code)) || is_gguf_file(path)) return path;
  const fs::path directory = fs::is_directory(path, code) ? path : path.parent_path();
  fs::path file = directory / "tokenizer.json";
  if (fs::is_regular_file(file, code)) return file;
  if (!a.tokenizer.empty() && !fs::exists(path, code)) {
    invalid_argument("--tokenizer {}: there is no such file or directory; make one with isomer tokenizer train",
                     a.tokenizer);
  }
  const bool is_builtin = a.tokenizer.empty() && !fs::exists(path, code);
  invalid_argument("--tokenizer: no tokenizer.json {} '{}'; name one, or make one with isomer tokenizer train",
                   is_builtin ? "comes with" : "in", is_builtin ? path.string() : directory.string());
}

/// The configuration as a checkpoint has it: with the dtype that its weights are in.
std::string checkpoint_config(const TrainSettings& settings) {
  auto json = nlohmann::ordered_json::parse(settings.config_json);
  json["torch_dtype"] = settings.dtype == "bf16" ? "bfloat16" : "float32";
  return json.dump(2) + "\n";
}

/// Whether this process writes files: rank 0, or the only process there is.
bool is_writer(const GroupOptions& group) { return group.backend == Backend::threads || mpi_world().rank == 0; }

TokenDataset load_tokens(const std::vector<std::string>& files, const Tokenizer& tokenizer, bool lossy,
                         Progress& progress) {
  if (files.size() == 1 && TokenDataset::is_token_file(files.front())) {
    TokenDataset data = TokenDataset::open(files.front());
    if (data.tokenizer_hash() != 0 && data.tokenizer_hash() != tokenizer.hash()) {
      invalid_argument("--data {}: its tokens were made by another tokenizer than this one", files.front());
    }
    return data;
  }
  TextOptions options{.lossy = lossy};
  options.progress = [&](std::int64_t done, std::int64_t all) {
    progress.show(fmt::format("tokens: {} of {}", format_bytes(static_cast<double>(done)),
                              format_bytes(static_cast<double>(all))));
  };
  return TokenDataset::from_text({files.begin(), files.end()}, tokenizer, options);
}

void check_vocabulary(std::int64_t tokens, std::string_view what, const ModelConfig& config) {
  if (tokens > config.vocab_size) {
    invalid_argument(
        "{} has {} tokens, the model's vocab_size is {}: raise it in config.json, or train a tokenizer with "
        "--vocab-size {}",
        what, tokens, config.vocab_size, config.vocab_size);
  }
}

GroupOptions group_of(const TrainArguments& a, const std::string& layout_text) {
  GroupOptions group;
  const Layout layout = parse_layout(layout_text);
  group.num_ranks = sequence_layout(sized_layout(layout, a.ranks)).num_ranks();
  if (a.ranks > 0 && group.num_ranks != a.ranks) {
    invalid_argument("--ranks {}: the layout {} has {}", a.ranks, layout_text, group.num_ranks);
  }
  group.backend = a.backend == "mpi" ? Backend::mpi : Backend::threads;
  group.threads_per_rank = a.threads;
  group.timeout_s = a.timeout_s;
  group.dry_run = a.dry_run;
  if (!a.link.empty()) group.link = parse_link(a.link);
  return group;
}

/// Where none was named: laga has nothing to gather without a latent.
void choose_layout(const TrainArguments& a, TrainRun& run) {
  if (a.layout.empty() && run.config.attention != AttentionKind::mla) run.settings.layout = "explicit:1";
}

/// The group, and the layout with every axis's size.
void size_layout(const TrainArguments& a, TrainRun& run) {
  run.group = group_of(a, run.settings.layout);
  run.settings.layout = to_string(sized_layout(parse_layout(run.settings.layout), run.group.num_ranks));
}

std::shared_ptr<const Tokenizer> parse_tokenizer(const TrainRun& run, const std::string& source) {
  auto tokenizer = std::make_shared<const Tokenizer>(
      Tokenizer::parse(run.files.tokenizer_json, source, run.files.tokenizer_config_json));
  check_vocabulary(tokenizer->vocab_size(), "the tokenizer", run.config);
  return tokenizer;
}

/// Missing files are told before a run starts processes or reads gigabytes.
void check_data_files(const TrainSettings& settings) {
  std::error_code code;
  const auto check = [&](std::string_view option, const std::string& file) {
    if (fs::is_directory(file, code)) {
      invalid_argument("{} {}: it is a directory; name its text files ({}/*.txt), or one token file", option, file,
                       file);
    }
    if (!fs::is_regular_file(file, code)) {
      invalid_argument("{} {}: there is no such file; name text files, or one token file", option, file);
    }
  };
  for (const std::string& file : settings.data) check("--data", file);
  if (!settings.eval_data.empty()) check("--eval-data", settings.eval_data);
}

/// The weights that --init-from names, in float32. A model that reads or writes them otherwise is refused by the
/// tensors' shapes, or here.
std::shared_ptr<const ModelWeights> weights_to_begin_with(const TrainRun& run) {
  if (run.settings.init_from.empty()) return nullptr;
  const fs::path path = run.settings.init_from;
  std::error_code code;
  if (!fs::exists(path, code)) {
    invalid_argument("--init-from {}: there is no such directory or file", path.string());
  }
  if (fs::exists(path / "tpla.json", code)) {
    invalid_argument(
        "--init-from {}: it has a side file (tpla.json) that fits these weights alone; train the model that it was "
        "converted from, then convert",
        path.string());
  }
  return std::make_shared<const ModelWeights>(load_model_weights(Checkpoint::open(path), run.config, DType::f32));
}

}  // namespace

PreparedRun prepare_dry_run(const TrainArguments& a) {
  if (a.config.empty()) {
    invalid_argument("--config: name a model: a directory with config.json, a JSON file or a built-in name");
  }
  TrainRun run{.settings = a.settings};
  run.settings.config_json = load_model_config_text(a.config);
  run.config = load_model_config(a.config);
  run.settings.model_name = run.config.name;
  choose_layout(a, run);
  size_layout(a, run);
  run.save_weights = false;
  run.dry_routing = a.routing == "zipf" ? RoutingSource::Kind::zipf : RoutingSource::Kind::balanced;
  check_run(run);
  if (a.dry_run && a.routing != "zipf" && a.routing != "balanced") {
    run.dry_trace = std::make_shared<const RoutingTrace>(
        RoutingTrace::load(a.routing, run.config, run.settings.batch, run.settings.seq));
  }
  if (!a.record_routing.empty()) {
    if (run.group.backend == Backend::mpi) {
      invalid_argument("--record-routing {}: a trace is made by ranks of one process; use --backend threads",
                       a.record_routing);
    }
    run.recorded_routing = std::make_shared<RoutingTrace>(run.config, run.settings.batch, run.settings.seq);
  }
  return {std::move(run), nullptr};
}

PreparedRun prepare_new_run(const TrainArguments& a, const RunDirectory& directory) {
  if (a.settings.data.empty()) invalid_argument("--data: name the text to train on, or a token file");
  if (a.out.empty()) invalid_argument("--out: name the directory that the run goes to");
  PreparedRun prepared = prepare_dry_run(a);
  TrainRun& run = prepared.run;
  run.save_weights = true;
  const fs::path file = tokenizer_file(a);
  const TokenizerTexts texts = Tokenizer::texts_at(file);
  run.files = {.config_json = checkpoint_config(run.settings),
               .tokenizer_json = texts.json,
               .tokenizer_config_json = texts.config_json};
  prepared.tokenizer = parse_tokenizer(run, file.string());
  check_data_files(run.settings);
  if (!run.settings.init_from.empty())
    run.settings.init_from = fs::absolute(run.settings.init_from).lexically_normal().string();
  run.initial_weights = weights_to_begin_with(run);
  prepared.lossy = a.lossy;
  if (is_writer(run.group)) directory.check_free();
  return prepared;
}

PreparedRun prepare_resumed_run(const TrainArguments& a, const RunDirectory& directory) {
  const std::string source = (directory.path() / "run.json").string();
  TrainRun run{.settings = train_settings_from(directory.settings(), source)};
  run.config = parse_model_config(parse_json(run.settings.config_json, source + ": config"), run.settings.model_name);
  if (!a.layout.empty()) run.settings.layout = a.layout;
  size_layout(a, run);
  check_run(run);
  run.resume = directory.latest().has_value();
  if (!run.resume) run.initial_weights = weights_to_begin_with(run);
  run.files = {.config_json = checkpoint_config(run.settings),
               .tokenizer_json = text_if_there(directory.path() / kTokenizerFile),
               .tokenizer_config_json = text_if_there(directory.path() / kTokenizerConfigFile)};
  auto tokenizer = parse_tokenizer(run, (directory.path() / kTokenizerFile).string());
  return {std::move(run), std::move(tokenizer)};
}

void load_data(PreparedRun& prepared, const RunDirectory& directory, Progress& progress) {
  TrainRun& run = prepared.run;
  std::error_code code;
  const bool is_made = fs::exists(directory.path() / kTokensFile, code);
  if (!is_made && fs::exists(directory.path() / "run.json", code)) {
    throw Error(fmt::format(
        "--resume {0}: {1} is missing from it, the tokens that the run is trained on; put it back, or begin "
        "a new run",
        directory.path().string(), kTokensFile));
  }
  const auto read = [&](const std::vector<std::string>& files, std::string_view kept) {
    TokenDataset data = is_made ? TokenDataset::open(directory.path() / kept)
                                : load_tokens(files, *prepared.tokenizer, prepared.lossy, progress);
    check_vocabulary(data.vocab_size(), files.front(), run.config);
    return data;
  };
  const TokenDataset data = read(run.settings.data, kTokensFile);
  const BatchOptions options{.seq_len = run.settings.seq, .seed = run.settings.seed};
  run.data = std::make_shared<const BatchOrder>(data, options);
  if (!run.settings.eval_data.empty()) {
    const BatchOptions in_order{.seq_len = run.settings.seq, .shuffle = false, .keep_tail = true};
    run.eval_data = std::make_shared<const BatchOrder>(read({run.settings.eval_data}, kEvalTokensFile), in_order);
  }
  if (is_made || !is_writer(run.group)) return;
  directory.create(to_json(run.settings), [&](const fs::path& place) {
    write_text_atomically(place / kTokenizerFile, run.files.tokenizer_json);
    write_text_atomically(place / kTokenizerConfigFile, run.files.tokenizer_config_json);
    data.save(place / kTokensFile);
    if (run.eval_data) run.eval_data->dataset().save(place / kEvalTokensFile);
  });
}

}  // namespace isomer
