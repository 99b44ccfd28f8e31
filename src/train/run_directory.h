// What a training run leaves on disk, so that a kill at any moment leaves the last good checkpoint (docs/training.md):
//
//   run.json                        the settings of the run, written once; with it what its creator adds (tokens, say)
//   metrics.jsonl                   one line a step
//   checkpoints/step-00000500/      config.json, model.safetensors, tokenizer.json: a Hugging Face directory; beside it
//                                   optimizer.safetensors and trainer.json
//   latest → checkpoints/step-…     replaced by one rename
//   config.json, model.safetensors, tokenizer.json, tokenizer_config.json → latest/…: the run itself is a model
//
// A checkpoint is written under another name, flushed and renamed; only then does `latest` point to it, and only then
// do older ones go.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "train/parameters.h"

namespace isomer {

/// Where a run stands, beside its weights and moments.
struct TrainerState {
  std::int64_t step = 0;     // steps done
  std::int64_t samples = 0;  // sequences consumed
  std::int64_t tokens = 0;   // targets seen
  double seconds = 0;        // of training, over all parts
  std::string layout;        // it was written under
  int num_ranks = 1;
};

/// A checkpoint that could not be read, and why.
struct DamagedCheckpoint {
  std::filesystem::path path;
  std::string reason;
};

/// That nobody else writes to a run: held from RunDirectory::lock to its destruction, or to the end of the process
/// however it comes.
class RunLock {
 public:
  explicit RunLock(int descriptor) : descriptor_(descriptor) {}
  RunLock(RunLock&& other) noexcept : descriptor_(other.descriptor_) { other.descriptor_ = -1; }
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;
  RunLock& operator=(RunLock&&) = delete;
  ~RunLock();

 private:
  int descriptor_;
};

class RunDirectory {
 public:
  explicit RunDirectory(std::filesystem::path path) : path_(std::move(path)) {}
  const std::filesystem::path& path() const { return path_; }

  /// Throws std::invalid_argument if a run can't be made here: there is one already, or something else stands at the
  /// path. An empty directory may.
  void check_free() const;
  /// Makes a new run, whole or not at all: under another name (which it is left with by a kill, and which the next try
  /// removes), then renamed. `fill` writes further files into the directory it is given. Throws as check_free does.
  void create(const nlohmann::json& settings, const std::function<void(const std::filesystem::path&)>& fill = {}) const;
  /// The settings it was created with. Throws isomer::Error if it is no run.
  nlohmann::json settings() const;

  /// The newest whole checkpoint's directory; nullopt before the first.
  std::optional<std::filesystem::path> latest() const;

  /// What a checkpoint holds beside weights and state, copied as it stands.
  struct ModelFiles {
    std::string config_json, tokenizer_json, tokenizer_config_json;  // empty: no such file
  };
  /// Writes the checkpoint of state.step (weights in `dtype`) and prunes all but the `keep` newest. Throws
  /// isomer::Error.
  void save(const Parameters& parameters, const TrainerState& state, const ModelFiles& files, DType dtype,
            int keep) const;
  struct Loaded {
    TrainerState state;
    std::vector<DamagedCheckpoint> damaged;  // newer than the one that was read
  };
  /// Master weights, moments and state of the newest checkpoint that can be read. Throws isomer::Error naming what is
  /// wrong with the newest if none can.
  Loaded load(RankContext& ctx, Parameters& parameters) const;
  /// Renames a checkpoint to ….damaged: it is kept, and nothing takes it for a checkpoint. Throws isomer::Error.
  std::filesystem::path set_aside(const std::filesystem::path& checkpoint) const;

  /// Of the newest checkpoint; 0 before the first.
  std::int64_t latest_step() const;
  /// Throws isomer::Error if another process trains here, and goes on for some seconds.
  [[nodiscard]] RunLock lock() const;

  /// What a kill between a checkpoint's rename and the end of `save` left undone: links to the newest, old ones and
  /// unfinished ones gone.
  void repair(int keep) const;

  /// Drops what metrics.jsonl says of steps after `step`: a run that was killed repeats them.
  void truncate_metrics(std::int64_t step) const;
  std::filesystem::path metrics_file() const { return path_ / "metrics.jsonl"; }

 private:
  std::filesystem::path checkpoint_of(std::int64_t step) const;
  TrainerState read(const std::filesystem::path& checkpoint, RankContext& ctx, Parameters& parameters) const;
  void point_latest_to(const std::filesystem::path& checkpoint) const;
  void link_model_files(const std::filesystem::path& checkpoint) const;
  void prune(int keep) const;

  std::filesystem::path path_;
};

/// Writes a text file under another name, flushes and renames it. Throws isomer::Error.
void write_text_atomically(const std::filesystem::path& path, std::string_view text);

}  // namespace isomer
