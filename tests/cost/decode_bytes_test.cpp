// The closed forms of a decode step against figures worked out by hand from their derivation, and against conservation:
// what all devices send is what all devices need.
#include "cost/decode_bytes.h"

#include <gtest/gtest.h>

#include <cmath>

namespace isomer {
namespace {

ModelConfig r1() { return load_model_config("deepseek-r1"); }        // D 7168, h 128, d 512, r 64, n 128, v 128
ModelConfig llama() { return load_model_config("llama-3.1-405b"); }  // D 16384, h 128, 8 KV heads of 128

double attention_bytes(const ModelConfig& config, const DecodeShards& shards, std::int64_t batch,
                       std::int64_t context = 0, int device = 0) {
  return decode_attention_transfers(config, shards, batch, context, device).bytes_sent(2);
}
double ffn_bytes(const ModelConfig& config, const DecodeShards& shards, bool moe, std::int64_t batch, int device = 0) {
  return decode_ffn_transfers(config, shards, moe, batch, device).bytes_sent(2);
}

TEST(DecodeBytes, OneDeviceSendsNothing) {
  for (const auto scheme : {DecodeScheme::tp, DecodeScheme::gla, DecodeScheme::tpla, DecodeScheme::exact_latent,
                            DecodeScheme::kvp, DecodeScheme::medha, DecodeScheme::helix}) {
    const DecodeShards one{.scheme = scheme};
    EXPECT_EQ(attention_bytes(r1(), one, 3, 1000), 0) << name_of(scheme);
    EXPECT_EQ(ffn_bytes(r1(), one, true, 3), 0) << name_of(scheme);
  }
}

TEST(DecodeBytes, TensorParallelAllReduces) {
  const DecodeShards tp8{.tpa = 8, .tpf = 8};
  // 2·7/8·8·7168·2
  EXPECT_EQ(attention_bytes(r1(), tp8, 8), 200704);
  EXPECT_EQ(ffn_bytes(r1(), tp8, true, 8), 200704);
  EXPECT_EQ(ffn_bytes(r1(), tp8, false, 8), 200704);
  EXPECT_EQ(decode_cache_elements(r1(), tp8), 576);
  EXPECT_EQ(decode_cache_elements(llama(), tp8), 256);             // one KV head
  EXPECT_EQ(decode_cache_elements(llama(), {.tpa = 64}), 256);     // duplicated
  EXPECT_EQ(decode_cache_elements(llama(), {.tpa = 3}), 3 * 256);  // ⌈8/3⌉
}

TEST(DecodeBytes, HelixExchangesLatentOrValues) {
  DecodeShards helix{.scheme = DecodeScheme::helix, .kvp = 8, .tpf = 8};
  const double all_reduce = 200704;
  // (KVP−1)·B·(h/N)·(w·e + 4) = 7·8·16·(1024 + 4) and 7·8·16·(256 + 4)
  EXPECT_EQ(attention_bytes(r1(), helix, 8), 921088 + all_reduce);
  helix.values_before = true;
  EXPECT_EQ(attention_bytes(r1(), helix, 8), 232960 + all_reduce);
  // Gathered queries: 7·8·16·192·2, absorbed before 7·8·16·576·2.
  helix.gather_queries = true;
  EXPECT_EQ(attention_bytes(r1(), helix, 8), 344064 + 232960 + all_reduce);
  helix.absorb_before = true;
  EXPECT_EQ(attention_bytes(r1(), helix, 8), 1032192 + 232960 + all_reduce);
  EXPECT_EQ(decode_cache_elements(r1(), helix), 72);
  // GQA, TPA 8 × KVP 2: 1·4·8·(256 + 4), and AR_16 of 4·16384 elements.
  const DecodeShards gqa{.scheme = DecodeScheme::helix, .kvp = 2, .tpa = 8, .tpf = 16};
  EXPECT_EQ(attention_bytes(llama(), gqa, 4), 8320 + 245760);
  EXPECT_EQ(decode_cache_elements(llama(), gqa), 128);
}

TEST(DecodeBytes, HelixExchangeDoesNotDependOnTheContext) {
  const DecodeShards helix{.scheme = DecodeScheme::helix, .kvp = 4};
  EXPECT_EQ(attention_bytes(r1(), helix, 8, 1), attention_bytes(r1(), helix, 8, 1 << 20));
}

TEST(DecodeBytes, ExpertsOfHelixJoinByGatherOrAllReduce) {
  DecodeShards helix{.scheme = DecodeScheme::helix, .kvp = 8, .tpf = 2, .ep = 4};
  EXPECT_EQ(ffn_bytes(r1(), helix, true, 8), 200704);
  helix.gather_experts = true;  // AR_2(114688) + 3·114688
  EXPECT_EQ(ffn_bytes(r1(), helix, true, 8), 114688 + 344064);
  EXPECT_EQ(ffn_bytes(r1(), helix, false, 8), 200704);  // a dense layer
  // At EP = 64 the gather sends 32 times an all-reduce.
  DecodeShards wide{.scheme = DecodeScheme::helix, .kvp = 64, .tpf = 1, .ep = 64};
  const double reduced = ffn_bytes(r1(), wide, true, 8);
  wide.gather_experts = true;
  EXPECT_DOUBLE_EQ(ffn_bytes(r1(), wide, true, 8) / reduced, 32);
}

TEST(DecodeBytes, KvpGathersQueriesAndScattersPartials) {
  const DecodeShards kvp{.scheme = DecodeScheme::kvp, .kvp = 8, .tpf = 8};
  // 7·8·16·576·2 + 7·4·8·128 + 7/8·8·128·512·2 + AR
  EXPECT_EQ(attention_bytes(r1(), kvp, 8), 1032192 + 28672 + 917504 + 200704);
  EXPECT_EQ(decode_cache_elements(r1(), kvp), 72);
}

TEST(DecodeBytes, MedhasRootSendsTheInputAndTheSlicesTheirPartials) {
  const DecodeShards medha{.scheme = DecodeScheme::medha, .kvp = 4, .tpa = 2, .tpf = 2};
  // Root: 3·8·16384·2 and AR_2; a slice: 8·64·(128·2 + 4).
  EXPECT_EQ(attention_bytes(llama(), medha, 8, 0, 0), 786432 + 262144);
  EXPECT_EQ(attention_bytes(llama(), medha, 8, 0, 5), 133120);
  EXPECT_EQ(ffn_bytes(llama(), medha, false, 8, 1), 262144);
  EXPECT_EQ(ffn_bytes(llama(), medha, false, 8, 2), 0);
}

TEST(DecodeBytes, LatentShards) {
  DecodeShards tpla{.scheme = DecodeScheme::tpla, .tpa = 4, .latent_shards = 2, .tpf = 4};
  EXPECT_EQ(decode_cache_elements(r1(), tpla), 320);
  EXPECT_EQ(attention_bytes(r1(), tpla, 8), 172032);  // AR_4
  tpla.split_latent_rows = true;                      // + AR_2 of 8 float32
  EXPECT_EQ(attention_bytes(r1(), tpla, 8), 172032 + 32);
  tpla.shared_columns = 128;
  EXPECT_EQ(decode_cache_elements(r1(), tpla), 384);
  DecodeShards by_heads{.scheme = DecodeScheme::tpla, .tpa = 2, .latent_shards = 2, .scatter_values = true};
  EXPECT_EQ(attention_bytes(r1(), by_heads, 8), 131072 + 114688);  // 1/2·8·128·128·2 and AR_2
  DecodeShards exact{.scheme = DecodeScheme::exact_latent, .tpa = 2, .latent_shards = 2};
  EXPECT_EQ(attention_bytes(r1(), exact, 1, 1000), 4 * 128 * 1000 + 14336);
  EXPECT_EQ(decode_cache_elements(r1(), exact), 320);
  exact.whole_rope = false;
  EXPECT_EQ(decode_cache_elements(r1(), exact), 288);
  EXPECT_EQ(decode_cache_elements(r1(), {.scheme = DecodeScheme::gla, .tpa = 2, .latent_shards = 2}), 320);
}

TEST(DecodeBytes, DataParallelDispatchesToOtherDevices) {
  // Published with the derivation: 4.63, 7.04, 7.56 other devices at N = 8, 32, 64 (256 experts, 8 a token).
  EXPECT_NEAR(expected_other_devices(256, 8, 8), 4.63, 0.005);
  EXPECT_NEAR(expected_other_devices(256, 8, 32), 7.04, 0.005);
  EXPECT_NEAR(expected_other_devices(256, 8, 64), 7.56, 0.005);
  EXPECT_EQ(expected_other_devices(256, 8, 1), 0);
  EXPECT_DOUBLE_EQ(expected_other_devices(8, 8, 4), 3);  // every expert of every device
  const DecodeShards dp{.data_parallel = 32, .ep = 32};
  EXPECT_EQ(attention_bytes(r1(), dp, 4), 0);
  // Four tokens there and back, and four bytes to 31 others that say how many come.
  EXPECT_NEAR(ffn_bytes(r1(), dp, true, 128), 2 * 4 * expected_other_devices(256, 8, 32) * 7168 * 2 + 4 * 31, 1e-6);
  EXPECT_EQ(decode_cache_elements(r1(), dp), 576);
  // Of a routing that is given: 3 rows out, 5 sums back.
  const RoutedRows routed{3, 5};
  EXPECT_EQ(decode_ffn_transfers(r1(), dp, true, 128, 0, &routed).bytes_sent(2), (3 + 5) * 7168 * 2 + 4 * 31);
  const std::int32_t experts[] = {0, 1, 7, /**/ 2, 3, 0, /**/ 7, 6, 4};
  EXPECT_EQ(rows_by_device(experts, 3, 8, 4), (std::vector<std::int64_t>{2, 1, 1, 2}));
  EXPECT_EQ(rows_by_device({}, 3, 8, 4), (std::vector<std::int64_t>{0, 0, 0, 0}));
  // A dense FFN cut over all: AG and RS of 128·7168 elements over 32.
  const DecodeShards dense{.data_parallel = 32, .tpf = 32};
  EXPECT_EQ(ffn_bytes(r1(), dense, false, 128), 2.0 * 31 / 32 * 128 * 7168 * 2);
  // 5 tokens over 2 devices: 3 and 2 of its own to the other, and the other's sums back.
  const DecodeShards two{.data_parallel = 2, .tpf = 2};
  EXPECT_EQ(ffn_bytes(r1(), two, false, 5, 0), (3 + 2) * 7168 * 2);
  EXPECT_EQ(ffn_bytes(r1(), two, false, 5, 1), (2 + 3) * 7168 * 2);
}

TEST(DecodeBytes, UnevenShardsAddUpToEvenOnes) {
  ModelConfig odd = r1();
  odd.num_attention_heads = odd.num_key_value_heads = 20;
  for (int kvp : {3, 7, 8}) {
    const DecodeShards helix{.scheme = DecodeScheme::helix, .kvp = kvp};
    double exchange = 0, reduce = 0;
    for (int device = 0; device < kvp; ++device) {
      for (const DecodeTransfer& t : decode_attention_transfers(odd, helix, 5, 0, device)) {
        (t.stage == DecodeStage::partials ? exchange : reduce) += t.bytes_sent(2);
      }
    }
    EXPECT_EQ(exchange, (kvp - 1) * 5 * 20 * (512 * 2 + 4)) << kvp;  // every head's partials but the owner's
    EXPECT_EQ(reduce, 2.0 * (kvp - 1) * 5 * 7168 * 2) << kvp;
  }
  // 20 heads on 8 slices: the first four own three. Exchange 5·(20 − 3)·1028, the last 5·(20 − 2)·1028.
  const DecodeShards helix{.scheme = DecodeScheme::helix, .kvp = 8};
  EXPECT_EQ(decode_attention_transfers(odd, helix, 5, 0, 0).begin()->bytes_sent(2), 87380);
  EXPECT_EQ(decode_attention_transfers(odd, helix, 5, 0, 7).begin()->bytes_sent(2), 92520);
}

TEST(DecodeBytes, BuffersAndSentBytesAgree) {
  // What a collective of N devices sends follows from its buffer: the planner prices buffers, ledgers count sends.
  const DecodeShards layouts[] = {{.tpa = 8},
                                  {.scheme = DecodeScheme::kvp, .kvp = 8},
                                  {.scheme = DecodeScheme::helix, .kvp = 4, .tpa = 2, .gather_queries = true},
                                  {.scheme = DecodeScheme::exact_latent, .tpa = 8, .latent_shards = 8},
                                  {.scheme = DecodeScheme::tpla, .tpa = 8, .latent_shards = 8, .scatter_values = true}};
  for (const DecodeShards& shards : layouts) {
    for (const DecodeTransfer& t : decode_attention_transfers(r1(), shards, 16, 64)) {
      const double share = (t.devices - 1.0) / t.devices;
      const double factor = t.collective == DecodeCollective::all_reduce ? 2 * share : share;
      EXPECT_DOUBLE_EQ(t.bytes_sent(2), factor * t.buffer_bytes(2)) << name_of(shards.scheme) << " " << t.name;
    }
  }
}

}  // namespace
}  // namespace isomer
