// What machine a figure was measured on, for every JSON output.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace isomer {

inline constexpr int kJsonSchemaVersion = 1;

/// The processor's name as the system gives it.
std::string processor_name();
int num_cores();

/// schema_version, version, machine, processor, cores, threads (a rank), instruction set, seed.
nlohmann::json machine_json(int threads_per_rank, std::uint64_t seed);

}  // namespace isomer
