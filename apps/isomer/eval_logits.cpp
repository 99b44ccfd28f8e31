// isomer eval logits: the logits that a model gives for token ids, for anyone to hold another implementation against.
#include <fmt/format.h>

#include <memory>

#include "apps/isomer/eval.h"
#include "apps/isomer/loaded_model.h"
#include "apps/isomer/token_ids.h"
#include "apps/isomer/units.h"
#include "comm/group.h"
#include "infer/engine.h"
#include "kernels/elementwise.h"
#include "model/safetensors.h"

namespace isomer {

namespace {

struct LogitsArguments {
  std::string model, ids, out, layout = "tp:1", backend = "threads", mode = "prefill", prefix = "0", dtype = "f32",
                               cache_dtype;
  std::string prefill_chunk = "512";
  int threads = 0;
};

constexpr std::int64_t kMostIds = std::int64_t{1} << 24;

/// Fills logits [ids, V]: `prefix` ids by prefill, the others token by token.
void run_rank(RankContext& ctx, Engine& engine, std::span<const std::int32_t> ids, std::size_t prefix,
              const Tensor& logits) {
  const int sequence = engine.add_sequence();
  const auto keep = [&](std::size_t row, const Tensor& part) {
    if (ctx.rank() == 0)
      copy(ctx, "collect logits", part, logits.slice(0, static_cast<std::int64_t>(row), part.size(0)));
  };
  if (prefix > 0) keep(0, engine.prefill(ctx, sequence, ids.first(prefix), LogitRows::all));
  for (std::size_t i = prefix; i < ids.size(); ++i) {
    const Engine::Input input{sequence, ids.subspan(i, 1)};
    keep(i, engine.decode(ctx, {&input, 1}));
  }
}

int run_logits(const LogitsArguments& a, const CommandLine& command_line) {
  const FoundModel model = find_model(a.model);
  const std::vector<std::int32_t> ids = read_token_ids(a.ids, model.config.vocab_size);
  const auto count = static_cast<std::int64_t>(ids.size());
  const std::int64_t longest = model.config.max_position_embeddings;
  if (longest > 0 && count > longest) {
    invalid_argument("--ids {}: {} ids, {} has {} positions (max_position_embeddings); give fewer", a.ids, count,
                     a.model, longest);
  }
  if (a.mode == "prefill" && a.prefix != LogitsArguments{}.prefix) {
    invalid_argument("--prefix {}: it goes with --mode decode; in prefill all positions are", a.prefix);
  }
  EngineOptions options{.config = model.config};
  if (a.layout.find("tpla") != std::string::npos) options.tpla = find_tpla(model);
  options.layout = layout_for(a.layout, model.config, options.tpla.get());
  if (!a.cache_dtype.empty()) options.cache_dtype = parse_dtype(a.cache_dtype);
  options.cache_tokens = cache_tokens_for({&count, 1}, options.layout, options.page_tokens);
  options.prefill_chunk = parse_count("--prefill-chunk", a.prefill_chunk, 1, kMostIds);
  const std::int64_t prefix = a.mode == "prefill" ? count : parse_count("--prefix", a.prefix, 0, count);
  GroupOptions group;
  group.num_ranks = options.layout.devices();
  group.threads_per_rank = a.threads;
  const std::string reason = why_step_unfit(options.layout, model.config, options.tpla.get());
  if (!reason.empty()) invalid_argument("--layout {}: {}", a.layout, reason);
  const bool mpi = a.backend == "mpi";
  if (mpi) group.backend = Backend::mpi;
  if (mpi && !under_mpirun()) relaunch_under_mpirun(group, command_line.argc, command_line.argv);
  const Tensor logits = Tensor::unrecorded("logits", DType::f32, {count, model.config.vocab_size});
  const ModelWeights weights = load_weights(model, parse_dtype(a.dtype));
  run_group(group, [&](RankContext& ctx) {
    Engine engine(ctx, options, weights);
    run_rank(ctx, engine, ids, static_cast<std::size_t>(prefix), logits);
  });
  if (mpi && mpi_world().rank != 0) return 0;
  const bool exact = prefix == count || is_exact(options.layout, model.config, options.tpla.get());
  write_safetensors(a.out, {tensor_source("logits", logits)},
                    {{"model", model.config.name},
                     {"layout", a.layout},
                     {"mode", a.mode},
                     {"dtype", a.dtype},
                     {"exact", exact ? "true" : "false"}});
  fmt::print("{}: logits [{}, {}], float32; {} positions by prefill, {} by decode; {}, {}{}\n", a.out, count,
             model.config.vocab_size, prefix, count - prefix, a.layout, a.dtype, exact ? "" : "; NOT EXACT");
  return 0;
}

}  // namespace

void add_eval_logits(CLI::App& eval, const CommandLine& command_line, int& exit_code) {
  auto a = std::make_shared<LogitsArguments>();
  CLI::App* command = eval.add_subcommand("logits", "logits of a checkpoint for given token ids, as safetensors");
  command->add_option("--model", a->model, "directory with config.json and weights, or a training run")->required();
  command->add_option("--ids", a->ids, "a file of whitespace-separated token ids")->required();
  command->add_option("--out", a->out, "the safetensors file to write: logits [ids, V]")->required();
  command->add_option("--layout", a->layout, "how decoding is spread over ranks (docs/inference.md)")
      ->capture_default_str();
  command->add_option("--backend", a->backend, "threads, or processes under Open MPI")
      ->check(CLI::IsMember({"threads", "mpi"}))
      ->capture_default_str();
  command->add_option("--mode", a->mode, "prefill, or decode: token by token behind --prefix")
      ->check(CLI::IsMember({"prefill", "decode"}))
      ->capture_default_str();
  command->add_option("--prefix", a->prefix, "with --mode decode: tokens by prefill before")->capture_default_str();
  command->add_option("--prefill-chunk", a->prefill_chunk, "tokens of a prefill at once")->capture_default_str();
  command->add_option("--dtype", a->dtype, "f32 or bf16")->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  command->add_option("--cache-dtype", a->cache_dtype, "f32 or bf16; default: --dtype")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command->add_option("--threads", a->threads, "a rank; default: a share of the cores")->check(CLI::Range(0, 1024));
  command->callback([a, command_line, &exit_code] { exit_code = run_logits(*a, command_line); });
}

}  // namespace isomer
