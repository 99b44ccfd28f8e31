// isomer compare --phase decode: what compare.cpp hands over.
#pragma once

#include <string>

#include "apps/isomer/commands.h"

namespace isomer {

/// The options as typed.
struct DecodeCompareArguments {
  std::string model, layouts, context = "4096", batch = "1", tokens = "4", dtype, backend, link, cache = "seeded";
  std::string json_file, dump_dir, text_file, seed;
  int ranks = 0, threads = 0;
  double timeout_s = 600;
  bool dry_run = false;
};

/// Returns the exit status.
int run_compare_decode(const DecodeCompareArguments& arguments, const CommandLine& command_line);

}  // namespace isomer
