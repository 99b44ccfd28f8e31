// Fits efficiency curves to measured operations.
//
// First the physical coefficients (launch time, shares of peak, exponent) by a Nelder-Mead search, then the surfaces by
// penalised least squares. Both work on ln(predicted / measured) with a robust loss: rows further off than kHuberWidth
// count by their distance, not its square. No row is left out, of the fit or of the errors. Rows held back are seen by
// neither. Deterministic.
#pragma once

#include "plan/hardware.h"
#include "plan/samples.h"

namespace isomer {

inline constexpr double kHuberWidth = 0.05;
inline constexpr int kFewestRows = 4;  // to fit a curve to

/// Rates that the curve of this family is relative to on this hardware.
Rates rates_of(const Hardware& hardware, const Curve& curve);

/// Seconds of one repetition by `curve`.
double predicted_seconds(const Curve& curve, const Operation& operation, Rates rates);

/// The curve fitted to the rows not held back, with its errors. Throws std::invalid_argument for fewer than 4 of them.
Curve fit_curve(const SampleFamily& family, Rates rates);

/// |predicted/measured − 1| of the rows on one side of the split.
std::vector<double> relative_errors(const Curve& curve, const SampleFamily& family, Rates rates, bool held_back);

}  // namespace isomer
