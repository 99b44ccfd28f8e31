// The main job: one block, one workload, P ranks; every scheme for real (or dry), each held against one rank in float64.
#pragma once

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "study/block_run.h"

namespace isomer {

/// Receives, at rank 0, what a layout (or "reference") came to: tensors by name, y, dx and "grad.NAME".
using ResultSink = std::function<void(const std::string& layout, const std::map<std::string, Tensor>& tensors)>;

struct CompareOptions {
  BlockProblem problem;
  GroupOptions group;
  std::vector<Layout> layouts;
  std::uint64_t seed = 1;
  std::string weights_source;  // for the report: "seeded", or the checkpoint's directory
  std::string text_source;
  DumpSink dump;               // receives "<layout>/…" names
  ResultSink results;          // at rank 0
};

struct TensorError {
  std::string tensor;  // "y", "dx", or a weight's name
  double max_abs = 0;        // largest |value − reference|
  double max_reference = 0;  // largest |reference|
  double bound = 0;          // on max_abs: 3 × one-rank explicit's error + 8 ε·max_reference
  bool within_bound() const { return std::isfinite(max_abs) && max_abs <= bound; }
  double relative() const { return max_reference > 0 ? max_abs / max_reference : max_abs; }
};

/// One row of the table.
struct SchemeReport {
  std::string name, layout;
  AttentionCore core = AttentionCore::fused;
  bool dry = false;
  BlockRun run;        // measured; in a dry run the dry one
  BlockRun predicted;  // the dry run
  std::int64_t bytes_sent = 0, bytes_predicted = 0;  // forward + backward, maximum over ranks; by the closed form
  bool bytes_agree = false;                          // on every rank and in both phases
  bool peak_agrees = false;                          // on every rank
  std::vector<TensorError> errors;                   // empty in a dry run
  bool exact = true;

  const TensorError* output_error() const;
  double max_gradient_relative_error() const;
  bool within_bound() const;
  bool good() const { return bytes_agree && peak_agrees && within_bound(); }
};

struct CompareReport {
  CompareOptions options;
  std::vector<SchemeReport> schemes;
  struct Omitted {
    std::string layout, reason;
  };
  std::vector<Omitted> omitted;
  double reference_seconds = 0;
  bool good() const;
};

/// Runs all layouts. `progress` is told what happens next. Under MPI only rank 0's report is complete.
CompareReport compare_schemes(const CompareOptions& options, const BlockData& data,
                              const std::function<void(const std::string&)>& progress);

/// The JSON twin of the table (docs/json.md).
nlohmann::json to_json(const CompareReport& report);

}  // namespace isomer
