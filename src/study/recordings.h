// Recordings of experiments too long for every `isomer claims`: made once by `--record DIR`, kept under docs/data/,
// carried by the executable, and what the claims' verdicts are computed from.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "study/claims.h"

namespace isomer {

/// docs/data/NAME.json as the build embeds it (cmake/embed_recordings.cmake); empty where there is none.
std::string_view embedded_recording(std::string_view name);

/// The recording `name`: the embedded one; or, with options.record, what `make` measures, written to
/// options.record/NAME.json together with machine, command and seed. Null where there is neither. Throws isomer::Error
/// naming a file that can't be written or an embedded text that can't be read.
nlohmann::json recording(const ClaimsOptions& options, const std::string& name, const std::string& command,
                         const std::function<nlohmann::json()>& make);

/// The verdict on a claim whose recording is missing from this build.
Claim without_recording(Claim claim);

/// "recorded on PROCESSOR, N cores, load L", for evidence.
std::string origin_of(const nlohmann::json& recorded);

}  // namespace isomer
