// Where the weights of a built-in model lie, if they ship with the program.
#pragma once

#include <string>

namespace isomer {

/// For a built-in model's name, the directory with its model.safetensors: models/NAME beside the executable, else in
/// the source tree that it was built from. Anything else, and a model that ships without weights, is returned as it is.
std::string shipped_model(const std::string& model);

}  // namespace isomer
