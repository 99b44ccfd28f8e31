#include "train/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "model/checkpoint.h"
#include "model/json_text.h"

namespace isomer {

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxJsonBytes = 16 << 20;
constexpr std::int64_t kMaxShardBytes = std::int64_t{5} << 30;
constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kUnfinished = ".unfinished";

[[noreturn]] void fail(const fs::path& path, int error) {
  throw Error(fmt::format("{}: {}", path.string(), std::strerror(error)));
}

/// Flushes a file or a directory, so that a rename never comes before what it names.
void flush(const fs::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail(path, errno);
  const int result = ::fsync(descriptor), error = errno;
  ::close(descriptor);
  if (result != 0) fail(path, error);
}

void rename_over(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail(to, errno);
}

/// A link that replaces what stood there in one step.
void link_atomically(const fs::path& target, const fs::path& link) {
  const fs::path temporary = link.string() + std::string(kUnfinished);
  std::error_code code;
  fs::remove(temporary, code);
  fs::create_symlink(target, temporary, code);
  if (code) throw Error(fmt::format("{}: {}", temporary.string(), code.message()));
  rename_over(temporary, link);
}

std::optional<std::int64_t> step_of(const fs::path& checkpoint) {
  const std::string name = checkpoint.filename().string();
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  std::int64_t step = 0;
  const char* begin = name.data() + kStepPrefix.size();
  const auto [end, code] = std::from_chars(begin, name.data() + name.size(), step);
  if (code != std::errc() || end != name.data() + name.size()) return std::nullopt;
  return step;
}

/// Whole checkpoints, oldest first. One is whole by being there: it got its name when all of it stood.
std::vector<fs::path> checkpoints_in(const fs::path& directory) {
  std::vector<fs::path> found;
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(directory, code)) {
    if (entry.is_directory() && step_of(entry.path())) found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end(), [](const fs::path& a, const fs::path& b) { return *step_of(a) < *step_of(b); });
  return found;
}

/// fn(prefix, flat buffer) for what the optimiser keeps.
template <class Fn>
void for_each_state(const Parameters& parameters, Fn&& fn) {
  fn("master.", parameters.master);
  fn("first_moment.", parameters.first_moment);
  fn("second_moment.", parameters.second_moment);
}

std::vector<TensorSource> optimizer_sources(const Parameters& parameters) {
  std::vector<TensorSource> sources;
  for_each_state(parameters, [&](std::string_view prefix, const Tensor& flat) {
    for (const Parameter& p : parameters.list()) {
      sources.push_back(tensor_source(std::string(prefix) + p.name, parameters.view(flat, p)));
    }
  });
  return sources;
}

void read_into(const Checkpoint& checkpoint, const std::string& name, const Tensor& to) {
  if (!checkpoint.contains(name)) {
    throw Error(fmt::format("{}: tensor '{}' is missing: the checkpoint is of another configuration",
                            checkpoint.path().string(), name));
  }
  const Tensor from = checkpoint.read(name, DType::f32);
  if (from.shape() != to.shape()) {
    throw Error(fmt::format("{}: tensor '{}' has shape {}: the configuration makes it {}", checkpoint.path().string(),
                            name, to_string(from.shape()), to_string(to.shape())));
  }
  std::memcpy(to.raw(), from.raw(), static_cast<std::size_t>(to.nbytes()));
}

nlohmann::json state_json(const TrainerState& s) {
  return {{"step", s.step},       {"samples", s.samples}, {"tokens", s.tokens},
          {"seconds", s.seconds}, {"layout", s.layout},   {"ranks", s.num_ranks}};
}

TrainerState state_from(const fs::path& file) {
  const nlohmann::json json = parse_json(read_text_file(file, kMaxJsonBytes), file.string());
  try {
    TrainerState state{.step = json.at("step"),
                       .samples = json.at("samples"),
                       .tokens = json.at("tokens"),
                       .seconds = json.at("seconds"),
                       .layout = json.at("layout"),
                       .num_ranks = json.at("ranks")};
    if (state.step != step_of(file.parent_path()) || state.samples < 0) {
      throw Error(fmt::format("{}: step {}, samples {}: not those of this checkpoint", file.string(), state.step,
                              state.samples));
    }
    return state;
  } catch (const nlohmann::json::exception& error) {
    throw Error(fmt::format("{}: {}", file.string(), error.what()));
  }
}

}  // namespace

void write_text_atomically(const fs::path& path, std::string_view text) {
  const fs::path temporary = path.string() + std::string(kUnfinished);
  {
    std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
    out.write(text.data(), static_cast<std::streamsize>(text.size()));
    out.close();
    if (!out) fail(temporary, errno);
  }
  flush(temporary);
  rename_over(temporary, path);
}

void RunDirectory::check_free() const {
  std::error_code code;
  if (fs::exists(path_ / "run.json", code)) {
    invalid_argument("--out {}: there is a run in it already; continue it with --resume {}, or name another directory",
                     path_.string(), path_.string());
  }
  if (!fs::exists(fs::symlink_status(path_, code))) return;
  const bool usable = fs::is_directory(fs::symlink_status(path_, code)) && fs::is_empty(path_, code);
  if (!usable || fs::equivalent(path_, fs::current_path(), code)) {
    invalid_argument("--out {}: it is not an empty directory beside this one; name a new one", path_.string());
  }
}

void RunDirectory::create(const nlohmann::json& settings, const std::function<void(const fs::path&)>& fill) const {
  check_free();
  fs::path place = fs::absolute(path_).lexically_normal();
  if (!place.has_filename()) place = place.parent_path();
  const fs::path staging = place.parent_path() / fmt::format(".{}{}", place.filename().string(), kUnfinished);
  std::error_code code;
  fs::remove_all(staging, code);
  fs::create_directories(staging / "checkpoints", code);
  if (code) throw Error(fmt::format("--out {}: can't be made: {}", path_.string(), code.message()));
  try {
    if (fill) fill(staging);
    write_text_atomically(staging / "run.json", settings.dump(2) + "\n");
    flush(staging);
    rename_over(staging, place);
  } catch (...) {
    fs::remove_all(staging, code);
    throw;
  }
  flush(place.parent_path());
}

nlohmann::json RunDirectory::settings() const {
  const fs::path file = path_ / "run.json";
  std::error_code code;
  if (!fs::exists(file, code)) {
    throw Error(
        fmt::format("--resume {}: there is no run.json in it: it is no directory of a training run", path_.string()));
  }
  return parse_json(read_text_file(file, kMaxJsonBytes), file.string());
}

fs::path RunDirectory::checkpoint_of(std::int64_t step) const {
  return path_ / "checkpoints" / fmt::format("{}{:08}", kStepPrefix, step);
}

std::optional<fs::path> RunDirectory::latest() const {
  const auto found = checkpoints_in(path_ / "checkpoints");
  if (found.empty()) return std::nullopt;
  return found.back();
}

void RunDirectory::point_latest_to(const fs::path& checkpoint) const {
  link_atomically(fs::path("checkpoints") / checkpoint.filename(), path_ / "latest");
}

void RunDirectory::link_model_files(const fs::path& checkpoint) const {
  const auto belongs = [](const std::string& name) {
    return name == "config.json" || name.starts_with("tokenizer") || name.starts_with("model");
  };
  for (const auto& entry : fs::directory_iterator(checkpoint)) {
    const std::string name = entry.path().filename().string();
    if (belongs(name)) link_atomically(fs::path("latest") / name, path_ / name);
  }
}

void RunDirectory::save(const Parameters& parameters, const TrainerState& state, const ModelFiles& files, DType dtype,
                        int keep) const {
  std::error_code code;
  // No checkpoint without the lines of its steps.
  if (fs::exists(metrics_file(), code)) flush(metrics_file());
  const fs::path final_path = checkpoint_of(state.step);
  const fs::path directory = final_path.string() + std::string(kUnfinished);
  fs::remove_all(directory, code);
  fs::create_directories(directory, code);
  if (code) throw Error(fmt::format("{}: can't be made: {}", directory.string(), code.message()));
  const auto write = [&](std::string_view name, const std::string& text) {
    if (!text.empty()) write_text_atomically(directory / name, text);
  };
  write_checkpoint(directory, model_tensor_sources(parameters.master_weights, dtype), kMaxShardBytes);
  write_safetensors(directory / "optimizer.safetensors", optimizer_sources(parameters));
  write("config.json", files.config_json);
  write("tokenizer.json", files.tokenizer_json);
  write("tokenizer_config.json", files.tokenizer_config_json);
  write("trainer.json", state_json(state).dump(2) + "\n");
  flush(directory);
  if (fs::exists(final_path, code)) {  // a step that is repeated: the one that stands is as good, and may be in use
    fs::remove_all(directory, code);
  } else {
    rename_over(directory, final_path);
  }
  flush(final_path.parent_path());
  point_latest_to(final_path);
  link_model_files(final_path);
  flush(path_);
  prune(keep);
}

void RunDirectory::repair(int keep) const {
  const auto newest = latest();
  if (!newest) return;
  point_latest_to(*newest);
  link_model_files(*newest);
  flush(path_);
  prune(keep);
}

void RunDirectory::prune(int keep) const {
  std::error_code code;
  auto found = checkpoints_in(path_ / "checkpoints");
  for (std::size_t i = 0; i + static_cast<std::size_t>(std::max(1, keep)) < found.size(); ++i) {
    // Loses its name first, so that no half of it is ever taken for a checkpoint.
    const fs::path doomed = found[i].string() + std::string(kUnfinished);
    fs::rename(found[i], doomed, code);
    if (!code) fs::remove_all(doomed, code);
  }
  for (const auto& entry : fs::directory_iterator(path_ / "checkpoints", code)) {
    if (entry.path().filename().string().ends_with(kUnfinished)) fs::remove_all(entry.path(), code);
  }
}

TrainerState RunDirectory::read(const fs::path& checkpoint, RankContext& ctx, Parameters& parameters) const {
  TrainerState state = state_from(checkpoint / "trainer.json");
  const Checkpoint moments = Checkpoint::open(checkpoint / "optimizer.safetensors");
  for_each_state(parameters, [&](std::string_view prefix, const Tensor& flat) {
    for (const Parameter& p : parameters.list()) {
      read_into(moments, std::string(prefix) + p.name, parameters.view(flat, p));
    }
  });
  // The correction biases are no parameters: they stand, in float32, with the weights.
  const Checkpoint model = Checkpoint::open(checkpoint);
  parameters.master_weights.for_each([&](const std::string& name, const Tensor& tensor) {
    if (name.ends_with("e_score_correction_bias")) read_into(model, name, tensor);
  });
  parameters.refresh(ctx);
  return state;
}

RunDirectory::Loaded RunDirectory::load(RankContext& ctx, Parameters& parameters) const {
  auto found = checkpoints_in(path_ / "checkpoints");
  Loaded loaded;
  for (; !found.empty(); found.pop_back()) {
    try {
      loaded.state = read(found.back(), ctx, parameters);
      return loaded;
    } catch (const Error& error) {
      loaded.damaged.push_back({found.back(), error.what()});
    }
  }
  if (loaded.damaged.empty()) throw Error(fmt::format("--resume {}: there is no checkpoint in it", path_.string()));
  throw Error(loaded.damaged.front().reason);
}

fs::path RunDirectory::set_aside(const fs::path& checkpoint) const {
  fs::path aside = checkpoint.string() + ".damaged";
  std::error_code code;
  fs::remove_all(aside, code);
  rename_over(checkpoint, aside);
  return aside;
}

std::int64_t RunDirectory::latest_step() const {
  const auto newest = latest();
  return newest ? *step_of(*newest) : 0;
}

RunLock RunDirectory::lock() const {
  // A process that was just killed holds it until its memory is given back.
  constexpr int kTries = 60;
  constexpr std::chrono::milliseconds kBetween(50);
  const fs::path file = path_ / "run.json";
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail(file, errno);
  int error = 0;
  for (int time = 0; time < kTries; ++time) {
    error = ::flock(descriptor, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    if (error != EWOULDBLOCK) break;
    std::this_thread::sleep_for(kBetween);
  }
  if (error != 0) {
    ::close(descriptor);
    if (error != EWOULDBLOCK) fail(file, error);
    throw Error(
        fmt::format("{}: another process trains in it; wait for its end, or stop it (Ctrl-C saves)", path_.string()));
  }
  return RunLock(descriptor);
}

RunLock::~RunLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void RunDirectory::truncate_metrics(std::int64_t step) const {
  std::ifstream in(metrics_file());
  if (!in) return;
  std::string kept;
  for (std::string line; std::getline(in, line);) {
    // A line that a kill cut short is dropped as well.
    const nlohmann::json json = nlohmann::json::parse(line, nullptr, false);
    if (json.is_object() && json.contains("step") && json["step"].is_number_integer() &&
        json["step"].get<std::int64_t>() <= step) {
      kept += line + "\n";
    }
  }
  in.close();
  write_text_atomically(metrics_file(), kept);
}

}  // namespace isomer
