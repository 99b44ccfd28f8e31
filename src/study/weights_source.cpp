#include "study/weights_source.h"

#include <filesystem>

#include "model/checkpoint.h"
#include "model/gguf.h"
#include "model/text.h"
#include "model/tokenizer.h"

namespace isomer {

namespace {

bool has_checkpoint(const std::filesystem::path& directory) {
  if (is_gguf_file(directory)) return true;
  return std::filesystem::exists(directory / "model.safetensors") ||
         std::filesystem::exists(directory / "model.safetensors.index.json");
}

/// Token ids in the order of rows: token s of sequence b, read from token b·seq of the text on, is row s·batch + b.
std::vector<std::int64_t> rows_of_text(const BlockProblem& problem, const WeightsSource& source,
                                       const std::string& text) {
  const auto count = static_cast<std::size_t>(problem.seq * problem.batch);
  const std::vector<std::int64_t> tokens = text_tokens(source, text, count);
  std::vector<std::int64_t> ids(count);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    for (std::int64_t s = 0; s < problem.seq; ++s) {
      ids[static_cast<std::size_t>(s * problem.batch + b)] = tokens[static_cast<std::size_t>(b * problem.seq + s)];
    }
  }
  return ids;
}

std::shared_ptr<const Tokenizer> tokenizer_beside(const std::filesystem::path& directory, const ModelConfig& config) {
  if (!Tokenizer::is_at(directory)) return nullptr;
  auto tokenizer = std::make_shared<const Tokenizer>(Tokenizer::load(directory));
  if (tokenizer->vocab_size() > config.vocab_size) {
    throw Error(fmt::format("{}: {} tokens, the model's vocab_size is {}: they don't belong together",
                            directory.string(), tokenizer->vocab_size(), config.vocab_size));
  }
  return tokenizer;
}

/// No more of `text` than `bytes`, cut between characters.
std::string_view prefix_of(std::string_view text, std::size_t bytes) {
  if (bytes >= text.size()) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80) --bytes;
  return text.substr(0, bytes);
}

}  // namespace

std::vector<std::int64_t> text_tokens(const WeightsSource& source, const std::string& text, std::size_t count,
                                      bool* wrapped) {
  if (!source.tokenizer) return byte_tokens(text, count, wrapped);
  // A token stands for few bytes: reading more of a long text than that would be for nothing.
  constexpr std::size_t kBytesOfAToken = 16;
  const std::string_view part = prefix_of(text, count * kBytesOfAToken + kBytesOfAToken);
  std::vector<std::int32_t> ids = source.tokenizer->encode(replace_invalid_utf8(part));
  if (ids.size() < count && part.size() < text.size()) ids = source.tokenizer->encode(replace_invalid_utf8(text));
  if (ids.empty() && count > 0) invalid_argument("the text is empty: there are no tokens in it");
  if (wrapped != nullptr) *wrapped = ids.size() < count;
  std::vector<std::int64_t> tokens(count);
  for (std::size_t i = 0; i < count; ++i) tokens[i] = ids[i % ids.size()];
  return tokens;
}

WeightsSource open_weights(const std::string& model, const ModelConfig& config, std::int64_t layer) {
  if (layer >= config.num_hidden_layers) {
    invalid_argument("--layer {}: {} has layers 0 to {}", layer, config.name, config.num_hidden_layers - 1);
  }
  WeightsSource source{.layer = layer, .description = "seeded"};
  if (has_checkpoint(model)) {
    source.checkpoint = std::make_shared<const Checkpoint>(Checkpoint::open(model));
    source.tokenizer = tokenizer_beside(model, config);
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
    data.x =
        load_embedding_rows(*source.checkpoint, problem.config, rows_of_text(problem, source, text), problem.dtype);
    return data;
  }
  data.weights = seeded_attention_weights(problem.config, seed, problem.dtype, shape_only, source.layer);
  data.x = shape_only ? Tensor::unrecorded("x", problem.dtype, {rows, hidden}, true)
                      : seeded_embedding_rows(seed, rows_of_text(problem, source, text), hidden, problem.dtype);
  return data;
}

}  // namespace isomer
