// `--dump`: weights, inputs, every rank's intermediates, outputs and gradients as safetensors, with a README and a
// NumPy reader: the oracle for somebody who ports a scheme into another stack.
#pragma once

#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "model/safetensors.h"
#include "study/block_run.h"

namespace isomer {

/// Throws std::invalid_argument for a directory that exists and is not empty.
void check_dump_directory(const std::filesystem::path& directory);

/// Collects tensors as ranks show them and writes one file a scheme and rank. Safe to use from several ranks' threads;
/// under MPI each process writes its own rank's files.
class Dump {
 public:
  /// `at_root` checks the directory and writes what is shared.
  Dump(std::filesystem::path directory, const BlockProblem& problem, const BlockData& data, int num_ranks,
       bool at_root);
  /// The same with what is shared said by the caller.
  Dump(std::filesystem::path directory, const std::string& readme, const std::vector<TensorSource>& shared,
       int num_ranks, bool at_root);
  /// Takes copies: "<layout>/<tensor>" of a rank; a name seen again replaces the earlier one (repetitions).
  DumpSink sink();
  /// Writes LAYOUT/result.safetensors at once.
  void write_result(const std::string& layout, const std::map<std::string, Tensor>& tensors) const;
  /// Writes the ranks' files.
  void finish();

 private:
  std::filesystem::path directory_;
  int num_ranks_;
  std::mutex mutex_;
  std::map<std::pair<std::string, int>, std::map<std::string, Tensor>> tensors_;  // (layout, rank) → name → tensor
};

}  // namespace isomer
