#include "study/weights_source.h"

#include <filesystem>

#include "model/checkpoint.h"
#include "model/text.h"

namespace isomer {

namespace {

bool has_checkpoint(const std::filesystem::path& directory) {
  return std::filesystem::exists(directory / "model.safetensors") ||
         std::filesystem::exists(directory / "model.safetensors.index.json");
}

/// Token ids in the order of rows: token s of sequence b, read from byte b·seq on, is row s·batch + b.
std::vector<std::int64_t> rows_of_text(const BlockProblem& problem, const std::string& text) {
  const auto count = static_cast<std::size_t>(problem.seq * problem.batch);
  const std::vector<std::int64_t> tokens = byte_tokens(text, count);
  std::vector<std::int64_t> ids(count);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    for (std::int64_t s = 0; s < problem.seq; ++s) {
      ids[static_cast<std::size_t>(s * problem.batch + b)] = tokens[static_cast<std::size_t>(b * problem.seq + s)];
    }
  }
  return ids;
}

}  // namespace

WeightsSource open_weights(const std::string& model, const ModelConfig& config, std::int64_t layer) {
  if (layer >= config.num_hidden_layers) {
    invalid_argument("--layer {}: {} has layers 0 to {}", layer, config.name, config.num_hidden_layers - 1);
  }
  WeightsSource source{.layer = layer, .description = "seeded"};
  if (std::filesystem::is_directory(model) && has_checkpoint(model)) {
    source.checkpoint = std::make_shared<const Checkpoint>(Checkpoint::open(model));
    source.description = fmt::format("layer {} of {}", layer, model);
  }
  return source;
}

BlockData load_block_data(const BlockProblem& problem, const WeightsSource& source, const std::string& text,
                          std::uint64_t seed, bool shape_only) {
  const std::int64_t rows = problem.seq * problem.batch, hidden = problem.config.hidden_size;
  BlockData data;
  data.dy = seeded_tensor(seed, "dy", {rows, hidden}, problem.dtype, 1.0, shape_only);
  if (source.checkpoint && !shape_only) {
    data.weights = load_attention_weights(*source.checkpoint, problem.config, source.layer, problem.dtype);
    data.x = load_embedding_rows(*source.checkpoint, problem.config, rows_of_text(problem, text), problem.dtype);
    return data;
  }
  data.weights = seeded_attention_weights(problem.config, seed, problem.dtype, shape_only, source.layer);
  data.x = shape_only ? Tensor::unrecorded("x", problem.dtype, {rows, hidden}, true)
                      : seeded_embedding_rows(seed, rows_of_text(problem, text), hidden, problem.dtype);
  return data;
}

}  // namespace isomer
