// What a checkpoint cannot say about its sharded decode: tpla.json (choices and where they come from) and
// tpla.safetensors (the scalars of every layer), beside the checkpoint that they belong to (docs/conversion.md has the
// format). The two are hostile until read: every field, shape and value is checked.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "model/checkpoint.h"
#include "model/config.h"
#include "model/tpla.h"

namespace isomer {

struct CalibrationFile {
  std::string name;  // without its directory
  std::int64_t bytes = 0;
  std::uint64_t hash = 0;  // fnv1a of its bytes
};

struct TplaSideFile {
  TplaOptions options;
  std::vector<TplaLayer> layers;
  // Where it comes from.
  std::string isomer_version;
  std::uint64_t seed = 0;
  std::uint64_t weights_hash = 0;  // of the checkpoint that it belongs to
  std::uint64_t scalars_hash = 0;  // of tpla.safetensors; filled by reading
  std::int64_t num_heads = 0, kv_lora_rank = 0, qk_rope_head_dim = 0;
  std::vector<CalibrationFile> calibration;
  std::int64_t align_steps = 0;         // kv_b was trained for so many a layer; 0: it is as rewritten, exact
  std::int64_t window = 0;              // tokens read at once
  std::int64_t calibration_tokens = 0;  // used for the second moments
};

inline constexpr std::uint64_t kFnvBasis = 0xcbf29ce484222325u;
/// FNV-1a, 64 bits; `state` goes on where another call ended.
std::uint64_t fnv1a(std::string_view bytes, std::uint64_t state = kFnvBasis);

/// Of name, dtype, shape and bytes of the tensors that the rewrite changes, in every layer: two checkpoints with the
/// same hash have the same latents.
std::uint64_t latent_weights_hash(const Checkpoint& checkpoint, const ModelConfig& config);

/// Writes tpla.safetensors, then tpla.json, each under another name that is renamed. Throws isomer::Error.
void write_tpla_side_file(const std::filesystem::path& directory, const TplaSideFile& side);

/// The two files by themselves: the text of a tpla.json (without layers; `source` names it in errors), and the scalars
/// of every layer under these options. Throw isomer::Error as load_tpla_side_file does.
TplaSideFile parse_tpla_json(std::string_view text, const ModelConfig& config, const std::string& source);
std::vector<TplaLayer> read_tpla_scalars(const std::filesystem::path& path, const ModelConfig& config,
                                         const TplaOptions& options);

/// Reads and checks both files of `directory` against its configuration and weights. Throws isomer::Error naming file,
/// field and value: where they are missing, malformed, of another model, or of other weights.
TplaSideFile load_tpla_side_file(const std::filesystem::path& directory, const ModelConfig& config,
                                 const Checkpoint& checkpoint);

}  // namespace isomer
