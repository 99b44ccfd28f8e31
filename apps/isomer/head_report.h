// The table and the JSON of what shards see, for eval heads and for the report of a conversion.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "eval/heads.h"
#include "model/tpla.h"

namespace isomer {

/// "pca, 2 shards, 16 shared columns, RMS exact, κ one: (d − m)/g + m + r = … of … cache elements a token and rank".
std::string tpla_line(const TplaOptions& options, const ModelConfig& config);
/// A row a layer and shard (means over heads), or, with `every_head`, one a head.
std::string head_table(const std::vector<LayerHeads>& layers, const TplaOptions& options, bool every_head);
nlohmann::json heads_json(const std::vector<LayerHeads>& layers, const TplaOptions& options);
/// The choices of a side file, under its keys.
nlohmann::json tpla_json(const TplaOptions& options, const ModelConfig& config);

}  // namespace isomer
