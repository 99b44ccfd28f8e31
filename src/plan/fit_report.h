// Fits and errors of all families of a device, for the program.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "plan/hardware.h"
#include "plan/samples.h"

namespace isomer {

/// Curves of all families with at least 4 rows to fit to, by label; `skipped` (if given) receives the labels of the
/// others. `progress` is told what is being fitted.
std::vector<Curve> fit_all(const Hardware& hardware, const SampleFamilies& families,
                           const std::function<void(const std::string&)>& progress,
                           std::vector<std::string>* skipped = nullptr);

/// What a hardware file says about its fit: method, treatment of outliers, split. `data` names the tables.
nlohmann::json fit_json(const std::string& data);

/// A shape that a curve misses by a factor.
struct Miss {
  double ratio = 1;  // predicted over measured
  double seconds = 0;
  bool held_back = false;
  std::string shape;
};

/// One line of `plan validate`.
struct Validation {
  std::string label;
  OperationKind kind = OperationKind::gemm;
  bool priced = true;
  std::vector<double> used_errors, held_back_errors;
  ErrorSummary used, held_back;  // of these
  std::vector<Miss> worst;       // of the rows held back, worst first
};

/// The curves of `hardware` against the samples. A family without a curve of its own is left out, and named in
/// `without_curve` (if given).
std::vector<Validation> validate(const Hardware& hardware, const SampleFamilies& families, std::size_t num_worst,
                                 std::vector<std::string>* without_curve = nullptr);

/// How far a fit carries beyond its rows: decode attention fitted to contexts up to a quarter of the longest,
/// collectives to groups up to half of the largest, and checked on the longer and larger ones (`held_back`). Families
/// whose rows allow neither are left out.
std::vector<Validation> extrapolate(const Hardware& hardware, const SampleFamilies& families);

/// All families of a kind together: rows weigh alike.
Validation pooled(const std::string& label, const std::vector<const Validation*>& parts);

/// Aimed-at mean error on rows held back: 0.10 for decode attention and gemm, 0.15 for collectives and moe; 0: none.
double aimed_error(OperationKind kind);

}  // namespace isomer
