// The second half of a fit: what the physical coefficients leave, as surfaces over the logarithms of the shape.
#pragma once

#include "plan/curves.h"
#include "plan/samples.h"

namespace isomer {

/// Fills curve.surfaces from the rows not held back. Knots between which no row lies follow their neighbours.
void fit_surfaces(Curve& curve, const SampleFamily& family, Rates rates);

/// The knots that a kind of operation gets for these samples; none beyond what they cover.
std::vector<Surface> surfaces_for(const SampleFamily& family);

/// Mean and 95th percentile.
ErrorSummary summarise(std::vector<double> errors);

}  // namespace isomer
