// Minimisation without derivatives, for a handful of unknowns.
#pragma once

#include <functional>
#include <vector>

namespace isomer {

/// The point of least `loss` that the downhill simplex finds from `start` with edges of length `edge`, in at most
/// `steps` steps. Nelder, Mead: A simplex method for function minimization, 1965. Deterministic.
std::vector<double> nelder_mead(const std::function<double(const std::vector<double>&)>& loss,
                                const std::vector<double>& start, double edge, int steps);

}  // namespace isomer
