// What isomer train makes of its command line before anything runs: a new run, a resumed one, a dry one.
#pragma once

#include <memory>
#include <string>

#include "apps/isomer/table.h"
#include "model/tokenizer.h"
#include "train/trainer.h"

namespace isomer {

struct TrainArguments {
  TrainSettings settings;
  std::string config, tokenizer, out, resume, layout, backend = "threads", link, json_file, seq = "512", seed = "1";
  std::string routing = "balanced", record_routing;
  std::int64_t stop_at = 0, save_every = 500;
  int keep = 2, ranks = 0, threads = 0;
  double timeout_s = 600;
  bool dry_run = false, lossy = false;
};

/// A run whose settings, layout, configuration and tokenizer are read and checked; nothing is written yet.
struct PreparedRun {
  TrainRun run;
  std::shared_ptr<const Tokenizer> tokenizer;  // null in a dry run
  bool lossy = false;                          // text that isn't UTF-8 is mended
};

/// All of them throw std::invalid_argument or isomer::Error, naming option, value, limit and remedy.
PreparedRun prepare_dry_run(const TrainArguments& a);
PreparedRun prepare_new_run(const TrainArguments& a, const RunDirectory& directory);
PreparedRun prepare_resumed_run(const TrainArguments& a, const RunDirectory& directory);

/// Reads the text; of a new run it then makes the directory, so that bad text leaves nothing behind.
void load_data(PreparedRun& prepared, const RunDirectory& directory, Progress& progress);

}  // namespace isomer
