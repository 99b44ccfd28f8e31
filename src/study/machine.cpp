#include "study/machine.h"

#include <sys/utsname.h>

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "kernels/cpu/elementwise.h"

namespace isomer {

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

int num_cores() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

nlohmann::json machine_json(int threads_per_rank, std::uint64_t seed) {
  utsname system{};
  uname(&system);
  return {{"schema_version", kJsonSchemaVersion},
          {"version", ISOMER_VERSION},
          {"machine", fmt::format("{} {} {}", system.sysname, system.release, system.machine)},
          {"processor", processor_name()},
          {"cores", num_cores()},
          {"instruction_set", cpu::name_of(cpu::available_instruction_sets().back())},
          {"threads", threads_per_rank},
          {"seed", seed}};
}

}  // namespace isomer
