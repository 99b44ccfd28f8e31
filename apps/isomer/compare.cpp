// isomer compare: one latent-attention block under every sharding, for real, and an account of all of it.
#include <fmt/ranges.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "apps/isomer/commands.h"
#include "apps/isomer/compare_decode.h"
#include "apps/isomer/output_file.h"
#include "apps/isomer/shipped_model.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "model/text.h"
#include "parallel/sequence/scheme.h"
#include "study/compare.h"
#include "study/dump.h"
#include "study/weights_source.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxSeq = std::int64_t{1} << 30;
constexpr int kMaxRanks = 4096;
constexpr std::int64_t kMaxBatch = 4096;
constexpr std::int64_t kMaxRows = std::int64_t{1} << 33;

/// The options as typed.
struct CompareArguments {
  std::string model = "tiny-mla", schemes = "all", seq = "1024", batch = "1", first_position = "0", dtype = "f32";
  int threads = 0;
  std::string attention = "fused", backend = "threads", link, memory = "lean", json_file, dump_dir, text_file;
  std::int64_t layer = 0;
  int ranks = 0;
  std::string seed = "1";
  double timeout_s = 600;
  bool dry_run = false;
  std::string phase = "train", context = "4096", tokens = "4", cache = "seeded";  // decode
};

std::vector<Layout> given_layouts(const std::string& text) {
  std::vector<Layout> given = parse_layouts(text);
  std::set<std::string> seen;
  for (const Layout& layout : given) {
    if (!seen.insert(to_string(layout)).second) invalid_argument("--schemes: '{}' is given twice", to_string(layout));
  }
  return given;
}

/// --ranks, or the largest product of a layout's axes, or 2 where no axis has a size.
int num_ranks_of(const CompareArguments& arguments, const std::vector<Layout>& layouts) {
  std::int64_t ranks = arguments.ranks;
  if (ranks == 0) {
    for (const Layout& layout : layouts) {
      std::int64_t product = 1;
      bool sized = false;
      for (const LayoutAxis& axis : layout.axes) {
        sized = sized || axis.size > 0;
        product = std::min<std::int64_t>(product * std::max(axis.size, 1), std::int64_t{kMaxRanks} + 1);
      }
      if (sized) ranks = std::max(ranks, product);
    }
    if (ranks == 0) ranks = 2;
  }
  if (ranks > kMaxRanks) invalid_argument("more ranks in a layout than the {} that can run", kMaxRanks);
  return static_cast<int>(ranks);
}

DType parse_dtype(const std::string& text) {
  if (text == "f32") return DType::f32;
  if (text == "bf16") return DType::bf16;
  invalid_argument("--dtype '{}': it takes f32 or bf16", text);
}

CompareOptions options_of(const CompareArguments& a, ModelConfig config) {
  CompareOptions options;
  const bool all = a.schemes == "all";
  if (!all) options.layouts = given_layouts(a.schemes);
  options.group.num_ranks = num_ranks_of(a, options.layouts);
  options.problem.config = std::move(config);
  if (!all) {  // refuses unknown names and options
    for (const Layout& layout : options.layouts) make_sequence_scheme(layout, options.problem.config);
  }
  if (all) options.layouts = all_sequence_layouts(options.problem.config, options.group.num_ranks);
  options.problem.dtype = parse_dtype(a.dtype);
  options.problem.seq = parse_count("--seq", a.seq, 1, kMaxSeq);
  options.problem.batch = parse_count("--batch", a.batch, 1, kMaxBatch);
  options.problem.first_position = parse_count("--first-position", a.first_position, 0, kMaxSeq);
  options.problem.core = a.attention == "eager" ? AttentionCore::eager : AttentionCore::fused;
  options.group.backend = a.backend == "mpi" ? Backend::mpi : Backend::threads;
  options.group.memory_policy = a.memory == "lean" ? MemoryPolicy::lean : MemoryPolicy::framework_eager;
  options.group.dry_run = a.dry_run;
  options.group.timeout_s = a.timeout_s;
  if (options.problem.seq > kMaxRows / options.problem.batch) {
    invalid_argument("--seq {} × --batch {}: more than {} tokens", options.problem.seq, options.problem.batch,
                     kMaxRows);
  }
  options.group.threads_per_rank = a.threads;
  if (!a.link.empty()) options.group.link = parse_link(a.link);
  options.seed = parse_seed(a.seed);
  return options;
}

std::string dimensions_of(const ModelConfig& c) {
  if (c.attention == AttentionKind::gqa) {
    return fmt::format("h {}, KV heads {}, head_dim {}", c.num_attention_heads, c.num_key_value_heads, c.head_dim);
  }
  return fmt::format("h {}, d {}, n {}, r {}, v {}", c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim,
                     c.qk_rope_head_dim, c.v_head_dim);
}

std::string title_of(const CompareReport& report) {
  const auto& o = report.options;
  const auto& c = o.problem.config;
  std::string text =
      fmt::format("{}: one attention block, {} tokens × {}, {}, {} ranks ({})", c.name, o.problem.seq, o.problem.batch,
                  name_of(o.problem.dtype), o.group.num_ranks, o.group.dry_run ? "dry run" : name_of(o.group.backend));
  text += fmt::format("\n  {}, hidden {}{}; weights {}{}\n", dimensions_of(c), c.hidden_size,
                      c.q_lora_rank > 0 ? fmt::format(", q_lora {}", c.q_lora_rank) : "",
                      o.group.dry_run ? "and tokens: shapes only" : o.weights_source,
                      o.group.dry_run ? "" : fmt::format("; tokens {}", o.text_source));
  if (o.group.link.emulated) {
    text += fmt::format("  link emulated: {} and {}/s a rank\n", format_seconds(o.group.link.latency_s),
                        format_bytes(o.group.link.bandwidth_bytes_per_s));
  }
  if (o.problem.first_position + o.problem.seq > c.max_position_embeddings && c.max_position_embeddings > 0) {
    text += fmt::format("  note: positions up to {} lie beyond the model's {}\n",
                        o.problem.first_position + o.problem.seq, c.max_position_embeddings);
  }
  return text;
}

std::string agreement(double measured, double predicted, bool agree) {
  return agree ? "=" : fmt::format("≠ {}", format_bytes(predicted - measured));
}

std::string main_table(const CompareReport& report) {
  const bool dry = report.options.group.dry_run;
  std::vector<std::string> header = {"scheme", "attention", "sent/rank", "closed form", "peak", "dry run"};
  if (dry) header = {"scheme", "attention", "sent/rank", "closed form", "peak (dry run)", "saved"};
  if (!dry) header.insert(header.end(), {"time", "clock", "output error", "gradient error", "exact?"});
  Table table(header);
  for (const SchemeReport& s : report.schemes) {
    const RankMeasure& peak = s.run.largest(&RankMeasure::peak_activation_bytes);
    const RankMeasure& dry_peak = s.predicted.largest(&RankMeasure::peak_activation_bytes);
    std::vector<std::string> row = {
        s.layout, std::string(name_of(s.core)), format_bytes(static_cast<double>(s.bytes_sent)),
        agreement(static_cast<double>(s.bytes_sent), static_cast<double>(s.bytes_predicted), s.bytes_agree),
        format_bytes(static_cast<double>(peak.peak_activation_bytes))};
    if (dry) {
      row.push_back(format_bytes(static_cast<double>(s.run.largest(&RankMeasure::saved_bytes).saved_bytes)));
    } else {
      row.push_back(agreement(static_cast<double>(peak.peak_activation_bytes),
                              static_cast<double>(dry_peak.peak_activation_bytes), s.peak_agrees));
      row.push_back(format_seconds(s.run.seconds()));
      row.emplace_back(s.run.virtual_clock ? "virtual" : "wall");
      row.push_back(fmt::format("{:.1e}", s.output_error()->max_abs));
      row.push_back(fmt::format("{:.1e}", s.max_gradient_relative_error()));
      row.emplace_back(s.within_bound() ? "within bound" : "OUTSIDE");
    }
    table.add(row);
  }
  return table.text();
}

std::string peak_table(const CompareReport& report) {
  Table table({"scheme", "largest in the peak", "", ""});
  for (const SchemeReport& s : report.schemes) {
    std::vector<std::string> row = {s.layout};
    const auto& standing = s.run.largest(&RankMeasure::peak_activation_bytes).standing_at_peak;
    for (std::size_t i = 0; i < std::min<std::size_t>(3, standing.size()); ++i) {
      row.push_back(fmt::format("{} {}", standing[i].name, format_bytes(static_cast<double>(standing[i].bytes))));
    }
    table.add(row);
  }
  return table.text();
}

std::string failures(const CompareReport& report) {
  std::string text;
  for (const SchemeReport& s : report.schemes) {
    for (const TensorError& e : s.errors) {
      if (e.within_bound()) continue;
      text += fmt::format(
          "{}: {} differs from the float64 reference by {:.3e}; its bound is {:.3e} (largest value {:.3e})\n", s.layout,
          e.tensor, e.max_abs, e.bound, e.max_reference);
    }
    if (!s.bytes_agree) text += fmt::format("{}: the bytes sent are not those of the closed form\n", s.layout);
    if (!s.peak_agrees) text += fmt::format("{}: the measured peak is not that of the dry run\n", s.layout);
  }
  return text;
}

/// One line a reason, with the layouts it keeps out.
std::string omitted_text(const CompareReport& report, const std::string& start) {
  std::map<std::string, std::vector<std::string>> by_reason;
  for (const auto& [layout, reason] : report.omitted) by_reason[reason].push_back(layout);
  std::string text;
  for (const auto& [reason, layouts] : by_reason)
    text += fmt::format("{}{}: {}\n", start, fmt::join(layouts, ", "), reason);
  return text;
}

void print_report(const CompareReport& report) {
  fmt::print("{}\n{}\n{}", title_of(report), main_table(report), peak_table(report));
  fmt::print("{}", omitted_text(report, "omitted: "));
  fmt::print(
      "\nsent/rank: bytes to other ranks, forward + backward without parameter gradients, the rank that sends most;"
      "\n  = the closed form says the same, on every rank. peak: saved + workspace + communication tensors of a "
      "rank.\n");
  if (report.options.group.dry_run) return;
  fmt::print(
      "errors: against one rank in float64 (largest difference; gradients relative to their largest value); the"
      "\n  bound is 3 × that of one-rank explicit + 8 ε·max|reference|. virtual: more ranks than cores, so times are"
      "\n  processor time plus the link's, not wall time.\n{}",
      failures(report));
}

/// What would fail only at the end of a long run fails here.
void check_places(const CompareArguments& a) {
  check_output_file("--json", a.json_file);
  if (a.dump_dir.empty()) return;
  if (a.dry_run) invalid_argument("--dump {}: a dry run has no tensors to write; leave out one of the two", a.dump_dir);
  if (!under_mpirun()) check_dump_directory(a.dump_dir);
}

/// What the report says of the text that makes `rows` tokens.
std::string text_source(const CompareArguments& a, const WeightsSource& source, const std::string& text,
                        std::int64_t rows) {
  bool wrapped = false;
  if (!a.dry_run) text_tokens(source, text, static_cast<std::size_t>(rows), &wrapped);
  return fmt::format("the {} of {}{}", source.tokenizer ? "tokens" : "bytes",
                     a.text_file.empty() ? "the novel in data/text" : a.text_file,
                     wrapped ? fmt::format(" ({} bytes, read again from its start)", text.size()) : "");
}

int run_compare(const CompareArguments& a, const CommandLine& command_line) {
  const std::string place = shipped_model(a.model);
  CompareOptions options = options_of(a, load_model_config(place));
  check_places(a);
  const bool mpi = options.group.backend == Backend::mpi && !options.group.dry_run;
  if (mpi && !under_mpirun()) relaunch_under_mpirun(options.group, command_line.argc, command_line.argv);
  const bool at_root = !mpi || mpi_world().rank == 0;

  Progress progress(at_root);
  progress.show("weights");
  const WeightsSource source = open_weights(place, options.problem.config, a.layer);
  options.weights_source =
      place == a.model ? source.description : fmt::format("layer {} of {}, which ships", a.layer, a.model);
  const std::string text = a.text_file.empty() ? std::string(default_text()) : load_text_bytes(a.text_file);
  options.text_source = text_source(a, source, text, options.problem.seq * options.problem.batch);
  const BlockData data = load_block_data(options.problem, source, text, options.seed, a.dry_run);

  std::unique_ptr<Dump> dump;
  if (!a.dump_dir.empty()) {
    dump = std::make_unique<Dump>(a.dump_dir, options.problem, data, options.group.num_ranks, at_root);
    options.dump = dump->sink();
    options.results = [&](const std::string& layout, const auto& tensors) { dump->write_result(layout, tensors); };
  }
  const CompareReport report = compare_schemes(options, data, [&](const std::string& what) { progress.show(what); });
  progress.show("");
  if (dump) dump->finish();
  if (!at_root) return 0;
  if (report.schemes.empty()) {
    fmt::print(stderr, "{}", omitted_text(report, "isomer: no layout fits: "));
    return 2;
  }
  print_report(report);
  if (dump) fmt::print("written to {}: every rank's tensors; its README.md says what is what\n", a.dump_dir);
  if (!a.json_file.empty()) write_output_file("--json", a.json_file, to_json(report));
  return report.good() ? 0 : 1;
}

/// Options of the other phase would do nothing.
void refuse_others(const CLI::App& command, const std::string& phase, const std::vector<std::string>& options) {
  for (const std::string& option : options) {
    if (command.count(option) > 0) {
      invalid_argument("{} does nothing with --phase {}: leave it out", option, phase);
    }
  }
}

int run_phase(const CompareArguments& a, const CLI::App& command, const CommandLine& command_line) {
  if (a.phase == "train") {
    refuse_others(command, a.phase, {"--context", "--tokens", "--cache"});
    return run_compare(a, command_line);
  }
  refuse_others(command, a.phase, {"--seq", "--first-position", "--attention", "--memory", "--layer"});
  return run_compare_decode({.model = a.model,
                             .layouts = a.schemes,
                             .context = a.context,
                             .batch = a.batch,
                             .tokens = a.tokens,
                             .dtype = a.dtype,
                             .backend = a.backend,
                             .link = a.link,
                             .cache = a.cache,
                             .json_file = a.json_file,
                             .dump_dir = a.dump_dir,
                             .text_file = a.text_file,
                             .seed = a.seed,
                             .ranks = a.ranks,
                             .threads = a.threads,
                             .timeout_s = a.timeout_s,
                             .dry_run = a.dry_run},
                            command_line);
}

}  // namespace

void add_compare(CLI::App& app, const CommandLine& command_line, int& exit_code) {
  auto a = std::make_shared<CompareArguments>();
  CLI::App* command =
      app.add_subcommand("compare", "run one attention block under every scheme and account for all of it");
  command->add_option("--model", a->model, "built-in name, directory of a checkpoint, or config.json")
      ->capture_default_str();
  command->add_option("--phase", a->phase, "train: one block, forward and backward; decode: tokens of the whole model")
      ->check(CLI::IsMember({"train", "decode"}))
      ->capture_default_str();
  command->add_option("--context", a->context, "decode: cached tokens a sequence (32K, 1M)")->capture_default_str();
  command->add_option("--tokens", a->tokens, "decode: new tokens of each sequence")->capture_default_str();
  command->add_option("--cache", a->cache, "decode: rows made up from the seed, or those of --text")
      ->check(CLI::IsMember({"seeded", "text"}))
      ->capture_default_str();
  command->add_option("--layer", a->layer, "layer of a checkpoint")->check(CLI::Range(0, 10000))->capture_default_str();
  command->add_option("--schemes,--layouts", a->schemes, "all, or layouts separated by semicolons (laga:4,v=view)")
      ->capture_default_str();
  command->add_option("--ranks", a->ranks, "number of ranks; default from the layouts, or 2")
      ->check(CLI::Range(1, kMaxRanks));
  command->add_option("--seq", a->seq, "tokens a sequence (2048, 16K)")->capture_default_str();
  command->add_option("--batch", a->batch, "sequences")->capture_default_str();
  command->add_option("--first-position", a->first_position, "position of the first token")->capture_default_str();
  command->add_option("--dtype", a->dtype, "f32 or bf16")->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  command->add_option("--attention", a->attention, "eager keeps its scores, fused recomputes")
      ->check(CLI::IsMember({"eager", "fused"}))
      ->capture_default_str();
  command->add_option("--backend", a->backend, "threads of this process, or processes under Open MPI")
      ->check(CLI::IsMember({"threads", "mpi"}))
      ->capture_default_str();
  command->add_option("--threads", a->threads, "a rank; default: a share of the cores")->check(CLI::Range(0, 1024));
  command->add_option("--link", a->link, "emulated link, LATENCY,BANDWIDTH a rank (5us,2GB/s)");
  command->add_option("--memory", a->memory, "when temporaries go")
      ->check(CLI::IsMember({"lean", "framework-eager"}))
      ->capture_default_str();
  command->add_option("--text", a->text_file, "text whose bytes are the tokens; default the novel in data/text");
  command->add_flag("--dry-run", a->dry_run, "shapes only: bytes and memory, in no time");
  command->add_option("--dump", a->dump_dir, "write every rank's tensors as safetensors to this directory");
  command->add_option("--json", a->json_file, "write the table as JSON");
  command->add_option("--seed", a->seed, "of weights, inputs and the output gradient")->capture_default_str();
  command->add_option("--timeout", a->timeout_s, "seconds without a sign of life after which a rank has stalled")
      ->check(CLI::Range(0.001, 1e6))
      ->capture_default_str();
  command->callback([a, command, command_line, &exit_code] { exit_code = run_phase(*a, *command, command_line); });
}

}  // namespace isomer
