// Decode layouts: text, what fits, weights and memory of a device, and that what the planner prices is what the closed
// forms say a device sends.
#include <gtest/gtest.h>

#include <set>

#include "plan/decode_cut.h"
#include "plan/decode_enumerate.h"
#include "plan/decode_operations.h"

namespace isomer {
namespace {

const ModelConfig& r1() {
  static const ModelConfig config = load_model_config("deepseek-r1");
  return config;
}
const ModelConfig& llama() {
  static const ModelConfig config = load_model_config("llama-3.1-405b");
  return config;
}

TEST(DecodeLayoutText, IsCanonical) {
  for (const char* text : {"tp:8",
                           "tp:8,ep=4",
                           "tp:8,pp:4",
                           "gla:g=2,tp=4",
                           "tpla:g=2,tp=4",
                           "tpla:g=2,tp=1,rms=reduce,wo=scatter",
                           "tpla:g=4,tp=1,m=64",
                           "exact-latent:2",
                           "exact-latent:2,rope=split",
                           "kvp:8",
                           "kvp:8,ep=8",
                           "medha:kvp=4,tpa=1",
                           "helix:kvp=8,tpa=1,tpf=2,ep=4",
                           "helix:kvp=4,tpa=2,tpf=8,ep=1,q=gather,absorb=before",
                           "helix:kvp=8,tpa=1,tpf=8,ep=1,wuv=before,hopb=off",
                           "helix:kvp=8,tpa=1,tpf=1,ep=8,experts=gather",
                           "dp-ep:32",
                           "dp-ep:8,tpf=8",
                           "tp:4,dp-ep:8",
                           "helix:kvp=4,tpa=1,dp-ep:2,pp:2"}) {
    EXPECT_EQ(to_string(parse_decode_layout(text, r1())), text);
  }
  EXPECT_EQ(to_string(parse_decode_layout("dp-ep:32,ep=32", r1())), "dp-ep:32");
  EXPECT_EQ(to_string(parse_decode_layout("dp-ep:8", llama())), "dp-ep:8,tpf=8");
  EXPECT_EQ(to_string(parse_decode_layout("pp:4", llama())), "tp:1,pp:4");
  EXPECT_EQ(parse_decode_layout("tp:8,pp:4", llama()).devices(), 32);
  EXPECT_EQ(parse_decode_layout("tpla:g=2,tp=4", r1()).devices(), 8);
  EXPECT_EQ(parse_decode_layout("helix:kvp=8,tpa=2", llama()).shards.tpf, 16);
}

TEST(DecodeLayoutText, EnumeratedLayoutsComeBackFromTheirText) {
  for (const ModelConfig* config : {&r1(), &llama()}) {
    std::set<std::string> seen;
    for (const DecodeLayout& layout : enumerate_decode_layouts(*config, 16)) {
      const std::string text = to_string(layout);
      EXPECT_TRUE(seen.insert(text).second) << text << " is enumerated twice";
      const DecodeLayout back = parse_decode_layout(text, *config);
      EXPECT_EQ(to_string(back), text);
      EXPECT_EQ(back.shards.tpf, layout.shards.tpf) << text;
      EXPECT_EQ(back.shards.ep, layout.shards.ep) << text;
      EXPECT_EQ(back.devices(), layout.devices()) << text;
    }
  }
}

TEST(DecodeLayoutText, NamesWhatIsWrong) {
  const auto message = [](const char* text) -> std::string {
    try {
      parse_decode_layout(text, r1());
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message("ulysses:8").find("there are: tp, gla"), std::string::npos);
  EXPECT_NE(message("helix:kvp=0,tpa=1").find("kvp=0"), std::string::npos);
  EXPECT_NE(message("helix:kvp=8,tpa=1,q=sometimes").find("q=replicate or q=gather"), std::string::npos);
  EXPECT_NE(message("tp:8,q=gather").find("no option 'q'"), std::string::npos);
  EXPECT_NE(message("pp:2,tp:8").find("out of place"), std::string::npos);
  EXPECT_NE(message("tp:8,dp-ep").find("dp-ep:4"), std::string::npos);
}

Unfit unfit(const char* text, const ModelConfig& config) {
  return why_unfit(parse_decode_layout(text, config), config);
}

TEST(DecodeLayoutFit, SaysWhy) {
  EXPECT_EQ(unfit("helix:kvp=8,tpa=1,tpf=2,ep=4", r1()), Unfit::fits);
  EXPECT_EQ(unfit("helix:kvp=8,tpa=1,tpf=2,ep=2", r1()), Unfit::ffn_devices);  // N = KVP·TPA = TPF·EP
  EXPECT_EQ(unfit("tp:3", r1()), Unfit::heads);
  EXPECT_EQ(unfit("tpla:g=2", llama()), Unfit::attention_kind);
  EXPECT_EQ(unfit("tpla:g=3,tp=1", r1()), Unfit::latent);  // every shard has all heads
  EXPECT_EQ(unfit("tpla:g=2,tp=3", r1()), Unfit::heads);
  EXPECT_EQ(unfit("tpla:g=2,tp=1,m=511", r1()), Unfit::latent);
  EXPECT_EQ(unfit("tp:8,ep=8", llama()), Unfit::experts);
  EXPECT_EQ(unfit("tp:1,pp:64", r1()), Unfit::layers);
  EXPECT_EQ(unfit("tp:4,dp-ep:2,tpf=2,ep=4", r1()), Unfit::ffn_devices);
  EXPECT_EQ(unfit("medha:kvp=4,tpa=1", llama()), Unfit::fits);
  ModelConfig narrow = r1();
  narrow.moe.moe_intermediate_size = 7;  // a column each at least
  EXPECT_EQ(unfit("tp:4", narrow), Unfit::fits);
  EXPECT_EQ(unfit("tp:8", narrow), Unfit::ffn_width);
}

double all_weights(const ModelConfig& config, const DecodeShards& shards) {
  const DecodeWeights w = decode_weights(config, shards);
  const StageLayers layers = stage_layers(config, 1);
  const auto dense = static_cast<double>(layers.dense), moe = static_cast<double>(layers.moe);
  return dense * (w.attention + w.dense_ffn) + moe * (w.attention + w.moe_ffn) + w.embedding + w.head;
}

TEST(DecodeWeights, OneDeviceHoldsTheWholeModel) {
  // Published sizes, without the multi-token-prediction layer; the last norm is not a layer's.
  EXPECT_EQ(all_weights(r1(), {}) + 7168, 671026419200.0);
  EXPECT_EQ(all_weights(llama(), {}) + 16384, 405853388800.0);
  EXPECT_EQ(num_parameters(r1()), 671026419200);
  EXPECT_EQ(num_parameters(llama()), 405853388800);
  for (const auto& name : builtin_model_names()) {
    const ModelConfig config = load_model_config(name);
    if (config.attention_bias) continue;  // biases are not priced
    EXPECT_NEAR(all_weights(config, {}) + static_cast<double>(config.hidden_size),
                static_cast<double>(num_parameters(config)), 0.0)
        << name;
  }
}

TEST(DecodeWeights, CacheOfAToken) {
  EXPECT_EQ(cache_elements_per_token(r1()), 35136);
  EXPECT_EQ(cache_elements_per_token(llama()), 258048);
  EXPECT_EQ(61 * decode_cache_elements(r1(), {}), 35136);
  EXPECT_EQ(126 * decode_cache_elements(llama(), {}), 258048);
}

TEST(DecodeWeights, HelixReplicatesProjectionsOfMla) {
  // q_a, q_b, kv_a and W_UK stand on every slice: 61,276,160 a layer of R1 (and three norms).
  const DecodeShards helix{.scheme = DecodeScheme::helix, .kvp = 64, .tpf = 64};
  const double own_values_and_output = 2.0 * 128 * 512 + 2.0 * 128 * 7168;  // two heads of W_UV and W_o
  EXPECT_EQ(decode_weights(r1(), helix).attention - own_values_and_output - (7168 + 1536 + 512), 61276160);
  DecodeShards gathered = helix;
  gathered.gather_queries = gathered.absorb_before = true;  // two heads of W_q_b and W_UK
  EXPECT_EQ(decode_weights(r1(), gathered).attention - own_values_and_output - (7168 + 1536 + 512),
            1536 * 7168 + 576 * 7168 + 2 * 192 * 1536 + 2 * 128 * 512);
}

Hardware hardware() { return load_hardware("gb200-nvl72"); }

double flops_of_step(const ModelConfig& config, std::int64_t context) {
  const DecodeProblem problem{.config = config, .context = context};
  DecodeOperations ops;
  decode_operations(problem, hardware(), {}, 1, ops);
  const StageLayers layers = stage_layers(config, 1);
  double flops = 0;
  const auto add = [&](const std::vector<Operation>& list, std::int64_t times) {
    for (const Operation& op : list) flops += static_cast<double>(times * op.count) * cost_of(op).flops;
  };
  for (const auto* list : {&ops.attention, &ops.core}) add(*list, layers.dense + layers.moe);
  add(ops.dense_ffn, layers.dense);
  add(ops.moe_ffn, layers.moe);
  add(ops.ends, 1);
  return flops;
}

TEST(DecodeFlops, TwoAWeightThatATokenMeetsAndTheAttention) {
  // Llama: every matrix but the embedding; attention 2·h·C·(128 + 128) a layer.
  const double llama_matrices = 405853388800.0 - 128256.0 * 16384 - (2 * 126 + 1) * 16384.0;
  EXPECT_EQ(flops_of_step(llama(), 1000), 2 * llama_matrices + 126.0 * 2 * 128 * 1000 * 256);
  // R1: of 256 experts, 8; W_UK and W_UV are used once each, factored. Norms and the router's bias multiply nothing.
  const double idle_experts = 58.0 * 248 * 3 * 7168 * 2048;
  const double vectors = 61.0 * (2 * 7168 + 1536 + 512) + 7168 + 58 * 256;
  const double r1_matrices = 671026419200.0 - 129280.0 * 7168 - idle_experts - vectors;
  EXPECT_EQ(flops_of_step(r1(), 1000), 2 * r1_matrices + 61.0 * 2 * 128 * 1000 * (576 + 512));
}

TEST(DecodeOperationsOfALayout, SendWhatTheClosedFormsSay) {
  const DecodeProblem mla{.config = r1(), .context = 4096}, gqa{.config = llama(), .context = 4096};
  const Hardware device = hardware();
  int checked = 0;
  for (const DecodeProblem* problem : {&mla, &gqa}) {
    for (const DecodeLayout& layout : enumerate_decode_layouts(problem->config, 16)) {
      if (why_unfit(layout, problem->config) != Unfit::fits) continue;
      const DecodeShards& s = layout.shards;
      if (s.scheme == DecodeScheme::medha) continue;  // priced at its root, which receives more than it sends
      const std::int64_t all = 16 * s.data_parallel, batch = all * layout.pp;
      DecodeOperations ops;
      decode_operations(*problem, device, layout, batch, ops);
      const auto sent = [](std::initializer_list<const std::vector<Operation>*> lists) {
        double bytes = 0;
        for (const auto* list : lists) {
          for (const Operation& op : *list) {
            if (is_collective(op.kind)) bytes += cost_of(op).bytes_written;
          }
        }
        return bytes;
      };
      EXPECT_NEAR(sent({&ops.attention, &ops.exchange}),
                  decode_attention_transfers(problem->config, s, 16, 4096).bytes_sent(2), 1e-3)
          << to_string(layout);
      const bool moe = problem->config.moe.n_routed_experts > 0;
      EXPECT_NEAR(sent({moe ? &ops.moe_ffn : &ops.dense_ffn}),
                  decode_ffn_transfers(problem->config, s, moe, all).bytes_sent(2), 1e-3)
          << to_string(layout);
      ++checked;
    }
  }
  EXPECT_GT(checked, 400);
}

TEST(DecodeOperationsOfALayout, AllDevicesTogetherDoTheSameAttention) {
  const DecodeProblem problem{.config = r1(), .context = 65536};
  const auto core_flops = [&](const char* text) {
    const DecodeLayout layout = parse_decode_layout(text, r1());
    DecodeOperations ops;
    decode_operations(problem, hardware(), layout, 64, ops);
    return cost_of(ops.core[0]).flops * layout.stage_devices();
  };
  const double one = core_flops("tp:1");
  for (const char* text : {"tp:8", "kvp:8", "helix:kvp=8,tpa=1", "helix:kvp=4,tpa=2", "dp-ep:8", "medha:kvp=8,tpa=1"}) {
    EXPECT_EQ(core_flops(text), one) << text;
  }
  // TPLA: the rope part, 64 of 1088 columns, once more on the second device.
  EXPECT_DOUBLE_EQ(core_flops("tpla:g=2,tp=1"), one * (1088 + 64) / 1088);
}

TEST(DecodeMemory, ShardsWhatItSaysItShards) {
  const DecodeProblem problem{
      .config = r1(), .context = 1 << 20, .precision = {.weights = Precision::nvfp4, .cache = Precision::nvfp4}};
  const auto memory = [&](const char* text, std::int64_t batch) {
    return decode_memory(problem, hardware(), parse_decode_layout(text, r1()), batch);
  };
  const double sequence = 35136.0 * (1 << 20) * 0.5625;
  EXPECT_EQ(memory("tp:8", 4).cache, 4 * sequence);  // the latent stands on every device
  EXPECT_EQ(memory("helix:kvp=8,tpa=1,tpf=8,ep=1", 4).cache, 4 * sequence / 8);
  EXPECT_EQ(memory("helix:kvp=4,tpa=2,tpf=8,ep=1", 4).cache, 4 * sequence / 4);
  EXPECT_EQ(memory("dp-ep:8", 8).cache, sequence);
  EXPECT_EQ(memory("tpla:g=2,tp=1", 4).cache, 4 * sequence * 320 / 576);
  const double router = 58.0 * (256 * 7168 + 256);  // stays in BF16
  EXPECT_NEAR(memory("tp:1", 1).weights, 0.5625 * (671026419200.0 - 7168 - router) + 2 * router, 1);
  EXPECT_NEAR(memory("dp-ep:8", 8).cache, memory("tp:1,pp:8", 8).cache * 61 / 64, 1e9);  // eight stages of 8 layers
}

}  // namespace
}  // namespace isomer
