// What is doubtful about a user's measurements and the curves fitted to them: told, not refused.
#pragma once

#include <string>
#include <vector>

#include "plan/samples.h"

namespace isomer {

/// A fit whose mean error exceeds this says little of the operation.
inline constexpr double kDoubtfulError = 0.30;
/// A time that implies so many times the device's peak is doubtful, and one that implies less than a thousandth of both
/// peaks where it is too long for a launch.
inline constexpr double kDoubtfulRate = 1.2, kDoubtfulShare = 1e-3, kLongestLaunch_s = 1e-3;

/// A sentence for each way in which times of the rows contradict the device, naming the first row, what it implies and
/// the unit that is expected. Empty where none does.
std::vector<std::string> doubtful_times(const Hardware& hardware, const SampleFamilies& families);

/// A sentence for each curve whose mean error, on the rows used or held back, exceeds kDoubtfulError.
std::vector<std::string> doubtful_fits(const std::vector<Curve>& curves);

}  // namespace isomer
