#include "apps/isomer/compare_decode.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <cmath>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "apps/isomer/loaded_model.h"
#include "apps/isomer/output_file.h"
#include "apps/isomer/shipped_model.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "model/checkpoint.h"
#include "model/gguf.h"
#include "model/text.h"
#include "sharding/layout.h"
#include "study/compare_decode.h"
#include "study/dump.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxContext = std::int64_t{1} << 30;
constexpr std::int64_t kMaxBatch = 4096, kMaxTokens = 4096;

std::vector<std::string> given_layouts(const DecodeCompareArguments& a, const ModelConfig& config, int& num_ranks) {
  num_ranks = a.ranks;
  if (a.layouts == "all") {
    if (num_ranks == 0) num_ranks = 2;
    return all_decode_layouts(config, num_ranks);
  }
  if (without_blanks(a.layouts).empty()) {
    invalid_argument(
        "--layouts is empty: give all, or layouts separated by semicolons, such as 'tp:2;helix:kvp=2,tpa=1'");
  }
  std::vector<std::string> layouts;
  std::set<std::string> seen;
  for (std::size_t begin = 0; begin <= a.layouts.size();) {
    const std::size_t end = std::min(a.layouts.find(';', begin), a.layouts.size());
    const std::string text = a.layouts.substr(begin, end - begin);
    const DecodeLayout layout = parse_decode_layout(text, config);  // refuses unknown names and options
    if (!seen.insert(to_string(layout)).second) invalid_argument("--layouts: '{}' is given twice", text);
    layouts.push_back(without_blanks(text));
    if (a.ranks == 0) num_ranks = std::max(num_ranks, layout.devices());
    begin = end + 1;
  }
  return layouts;
}

/// Tokens (bytes, where there is no tokenizer) of a text, a sequence after another, read again from its start at its
/// end.
std::vector<std::vector<std::int32_t>> prompts_of(const DecodeCompareArguments& a, const std::string& directory,
                                                  const DecodeWorkload& w, bool& repeated) {
  const std::string text = a.text_file.empty() ? std::string(default_text()) : load_text_bytes(a.text_file);
  std::vector<std::int32_t> ids;
  if (Tokenizer::is_at(directory)) {
    ids = tokenizer_for({a.model, directory, w.config}, "").encode(text, false);
  } else {
    for (const char c : text) ids.push_back(static_cast<std::uint8_t>(c) % static_cast<int>(w.config.vocab_size));
  }
  if (ids.empty()) invalid_argument("--text {}: it is empty", a.text_file);
  std::vector<std::vector<std::int32_t>> prompts(static_cast<std::size_t>(w.batch));
  std::size_t next = 0;
  for (auto& prompt : prompts) {
    while (static_cast<std::int64_t>(prompt.size()) < w.context) prompt.push_back(ids[next++ % ids.size()]);
  }
  repeated = next > ids.size();
  return prompts;
}

/// Weights and caches of a real run, of all ranks and of the float64 reference, as far as they are known beforehand.
void check_memory(const DecodeCompareOptions& o) {
  const DecodeWorkload& w = o.workload;
  const double element = static_cast<double>(size_of(w.dtype));
  const double tokens = static_cast<double>(w.batch * (w.context + w.tokens) * w.config.num_hidden_layers);
  const double row = static_cast<double>(cache_row_shape(w.config, rank_cache_of({}, w.config, 0)).elements());
  const double need = static_cast<double>(num_parameters(w.config)) * (element + 8) +
                      tokens * row * std::max(8.0, element * (o.group.backend == Backend::mpi ? 1 : o.group.num_ranks));
  const double have = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  if (need <= 0.9 * have) return;
  invalid_argument(
      "{} at {} cached tokens × {} sequences on {} ranks takes about {} with its float64 reference, this machine has "
      "{}: "
      "take --dry-run, or a smaller --context or --batch",
      w.config.name, w.context, w.batch, o.group.num_ranks, format_bytes(need), format_bytes(have));
}

DecodeCompareOptions options_of(const DecodeCompareArguments& a, const std::string& place) {
  DecodeCompareOptions o;
  DecodeWorkload& w = o.workload;
  w.config = load_model_config(place);
  w.dtype = parse_dtype(a.dtype);
  w.context = parse_count("--context", a.context, 1, kMaxContext);
  w.batch = parse_count("--batch", a.batch, 1, kMaxBatch);
  w.tokens = parse_count("--tokens", a.tokens, 1, kMaxTokens);
  w.seed = parse_seed(a.seed);
  o.layouts = given_layouts(a, w.config, o.group.num_ranks);
  o.group.backend = a.backend == "mpi" ? Backend::mpi : Backend::threads;
  o.group.dry_run = a.dry_run;
  o.group.timeout_s = a.timeout_s;
  o.group.threads_per_rank = a.threads;
  if (!a.link.empty()) {
    if (a.dry_run) invalid_argument("--link {}: a dry run takes no time; leave out one of the two", a.link);
    o.group.link = parse_link(a.link);
  }
  if (a.cache == "seeded" && !a.text_file.empty()) {
    invalid_argument("--text {}: seeded rows have no text; give --cache text", a.text_file);
  }
  if (a.dry_run && a.cache == "text")
    invalid_argument("--cache text: a dry run caches nothing; leave out one of the two");
  o.cache_source = a.dry_run ? "shapes only" : "seeded rows";
  if (a.cache == "text") {
    bool repeated = false;
    w.prompts = prompts_of(a, place, w, repeated);
    o.cache_source = a.text_file.empty() ? "the novel in data/text" : a.text_file;
    if (repeated) o.cache_source += ", repeated";
  }
  if (!a.dry_run) check_memory(o);
  return o;
}

/// A checkpoint's, or seeded ones whose logits have a standard deviation of about 3.
ModelWeights weights_of(const std::string& place, DecodeCompareOptions& o) {
  const DecodeWorkload& w = o.workload;
  if (o.group.dry_run) {
    o.weights_source = "shapes only";
    return {};
  }
  std::error_code code;
  if (fs::is_directory(place, code) || is_gguf_file(place)) {
    const Checkpoint checkpoint = Checkpoint::open(place);
    o.weights_source = place;
    o.workload.tpla = find_tpla({place, place, w.config});
    return load_model_weights(checkpoint, w.config, w.dtype);
  }
  o.weights_source = fmt::format("seeded ({})", w.seed);
  return initial_model_weights(w.config, w.seed, w.dtype, 3 / std::sqrt(static_cast<double>(w.config.hidden_size)));
}

std::string title_of(const DecodeCompareReport& report) {
  const auto& o = report.options;
  const auto& w = o.workload;
  std::string text =
      fmt::format("{}: decode, {} cached tokens × {} sequences, {}, {} ranks ({})\n  weights {}; cache {}\n",
                  w.config.name, w.context, w.batch, name_of(w.dtype), o.group.num_ranks,
                  o.group.dry_run ? "dry run" : name_of(o.group.backend), o.weights_source, o.cache_source);
  if (o.group.link.emulated) {
    text += fmt::format("  link emulated: {} and {}/s a rank\n", format_seconds(o.group.link.latency_s),
                        format_bytes(o.group.link.bandwidth_bytes_per_s));
  }
  if (w.config.max_position_embeddings > 0 && w.context + w.tokens > w.config.max_position_embeddings) {
    text += fmt::format("  note: positions up to {} lie beyond the model's {}\n", w.context + w.tokens,
                        w.config.max_position_embeddings);
  }
  return text;
}

std::vector<std::string> row_of(const DecodeLayoutReport& l, std::int64_t batch) {
  const auto per_token = [&](std::int64_t bytes) {
    return format_bytes(static_cast<double>(bytes) / static_cast<double>(batch));
  };
  const DecodeMeasure& m = l.run.busiest();
  std::vector<std::string> row = {l.layout, format_bytes(static_cast<double>(l.cache_bytes)), per_token(l.bytes_sent),
                                  l.bytes_agree ? "=" : per_token(l.bytes_predicted), fmt::format("{}", m.messages)};
  if (l.dry) return row;
  row.push_back(format_seconds(l.run.seconds()));
  row.emplace_back(l.run.virtual_clock ? "virtual" : "wall");
  const DecodeMeasure& critical = l.run.critical();
  for (const char* part : {"attention", "exchange", "projections", "ffn", "router"}) {
    const auto found = critical.seconds_by_part.find(part);
    row.push_back(found == critical.seconds_by_part.end() ? "-" : format_seconds(found->second));
  }
  row.push_back(format_seconds(critical.seconds_waiting));
  row.push_back(fmt::format("{:.1e}", l.max_logit_error));
  row.push_back(l.first_different_token < 0 ? "none" : fmt::format("{}", l.first_different_token));
  row.emplace_back(!l.exact ? "not exact" : l.within_bound() ? "within bound" : "OUTSIDE");
  return row;
}

void print_report(const DecodeCompareReport& report) {
  const bool dry = report.options.group.dry_run;
  std::vector<std::string> header = {"layout", "cache/rank", "sent/rank,token", "closed form", "messages"};
  if (!dry) {
    header.insert(header.end(), {"time/token", "clock", "attention", "exchange", "projections", "FFN", "router",
                                 "waiting", "logit error", "first other token", "exact?"});
  }
  Table table(header);
  for (const DecodeLayoutReport& l : report.layouts) table.add(row_of(l, report.options.workload.batch));
  fmt::print("{}\n{}", title_of(report), table.text());
  for (const DecodeLayoutReport& l : report.layouts) {
    if (!l.note.empty()) fmt::print("{}: {}\n", l.layout, l.note);
    if (l.bytes_uniform > 0) {
      fmt::print("{}: rows go to the experts that {}; uniform routing would send {} on average\n", l.layout,
                 dry ? "uniform draws choose" : "the router chose in the last step",
                 format_bytes(l.bytes_uniform / static_cast<double>(report.options.workload.batch)));
    }
  }
  std::map<std::string, std::vector<std::string>> by_reason;
  for (const auto& [layout, reason] : report.omitted) by_reason[reason].push_back(layout);
  for (const auto& [reason, layouts] : by_reason) fmt::print("omitted: {}: {}\n", fmt::join(layouts, ", "), reason);
  fmt::print(
      "\nsent: bytes to other ranks for one new token, the rank that sends most; = the closed form says the same, on "
      "every rank.\n  messages: of that rank in a step.\n");
  if (dry) return;
  fmt::print(
      "time/token: one step of all sequences, the median, of the slowest rank; the parts are of the rank that "
      "waits least,\n  in its median step. errors: against one rank in float64; the bound is 3 × that of one rank's "
      "explicit "
      "form "
      "+ 8 ε·max|logit|.\n");
  if (report.bound_says_little()) {
    fmt::print(
        "  note: one rank in {} is off by so much itself that the bound, {:.2g} of logits up to {:.2g}, says little of "
        "exactness; --dtype f32 tells\n",
        name_of(report.options.workload.dtype), report.layouts.front().bound, report.max_reference);
  }
}

std::string dump_readme(const DecodeCompareOptions& o) {
  return fmt::format(
      "# One decode step, rank by rank\n\n{}: {} cached tokens × {} sequences, {}, {} ranks; weights {}; cache {}.\n\n"
      "| file | what |\n|---|---|\n| shared.safetensors | empty: weights are the model's, seeded rows those of the "
      "seed "
      "|\n| LAYOUT/rankN.safetensors | what rank N had in the last step, layer.L.NAME |\n| read.py | `load(path)` "
      "gives "
      "{{name: array}} |\n\nq [T, heads, width] with rope; new rows [T, d + r] (latent) or new keys and values; "
      "partial o "
      "[T, heads, w] and partial lse [heads, T] over the rank's slice (with overlap those of the last sequence); o and "
      "lse "
      "of all slices [slices, T, own heads, w | lse bits]; o [T, own heads, v], the input of W_o; y [T, D] after each "
      "half "
      "of the layer.\n",
      o.workload.config.name, o.workload.context, o.workload.batch, name_of(o.workload.dtype), o.group.num_ranks,
      o.weights_source, o.cache_source);
}

void print_failures(const DecodeCompareReport& report) {
  for (const DecodeLayoutReport& l : report.layouts) {
    if (!l.bytes_agree) {
      fmt::print("{}: sends {} bytes a step, the closed form says {}\n", l.layout, l.bytes_sent, l.bytes_predicted);
    }
    if (l.exact && !l.within_bound()) {
      fmt::print("{}: logits differ from float64 by {:.3e}; the bound is {:.3e} (largest logit {:.3e})\n", l.layout,
                 l.max_logit_error, l.bound, report.max_reference);
    }
  }
}

}  // namespace

int run_compare_decode(const DecodeCompareArguments& a, const CommandLine& command_line) {
  const std::string place = shipped_model(a.model);
  DecodeCompareOptions options = options_of(a, place);
  check_output_file("--json", a.json_file);
  if (!a.dump_dir.empty() && a.dry_run) {
    invalid_argument("--dump {}: a dry run has no tensors to write; leave out one of the two", a.dump_dir);
  }
  if (!a.dump_dir.empty() && !under_mpirun()) check_dump_directory(a.dump_dir);
  const bool mpi = options.group.backend == Backend::mpi && !a.dry_run;
  if (mpi && !under_mpirun()) relaunch_under_mpirun(options.group, command_line.argc, command_line.argv);
  const bool at_root = !mpi || mpi_world().rank == 0;
  Progress progress(at_root);
  progress.show("weights");
  const ModelWeights weights = weights_of(place, options);
  std::unique_ptr<Dump> dump;
  if (!a.dump_dir.empty()) {
    dump = std::make_unique<Dump>(a.dump_dir, dump_readme(options), std::vector<TensorSource>(),
                                  options.group.num_ranks, at_root);
    options.dump = dump->sink();
  }
  const DecodeCompareReport report =
      compare_decode(options, weights, [&](const std::string& what) { progress.show(what); });
  progress.show("");
  if (dump) dump->finish();
  if (!at_root) return 0;
  if (report.layouts.empty()) {
    for (const auto& [layout, reason] : report.omitted) {
      fmt::print(stderr, "isomer: no layout fits: {}: {}\n", layout, reason);
    }
    return 2;
  }
  print_report(report);
  print_failures(report);
  if (dump) fmt::print("written to {}: every rank's tensors; its README.md says what is what\n", a.dump_dir);
  if (!a.json_file.empty()) write_output_file("--json", a.json_file, to_json(report));
  return report.good() ? 0 : 1;
}

}  // namespace isomer
