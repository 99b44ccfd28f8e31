// isomer compare --phase decode, as a user runs it: every layout beside the others, real and dry.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "full_tests.h"
#include "model/temp_folder.h"
#include "study/compare_decode.h"
#include "study/program.h"

namespace isomer {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::run_isomer;

json json_at(const std::string& path) { return json::parse(std::ifstream(path)); }

const json& layout_of(const json& report, const std::string& layout) {
  const auto found = std::find_if(report.at("layouts").begin(), report.at("layouts").end(),
                                  [&](const json& l) { return l.at("layout") == layout; });
  if (found == report.at("layouts").end()) throw std::runtime_error("no layout " + layout);
  return *found;
}

TEST(CompareDecode, HoldsEveryLayoutAgainstOneRank) {
  const TempFolder folder;
  const std::string file = (folder.path() / "report.json").string(), dump = (folder.path() / "dump").string();
  const auto run =
      run_isomer(fmt::format("compare --phase decode --model tiny-mla --context 150 --batch 3 --tokens 3 --layouts all "
                             "--ranks 4 --json {} --dump {}",
                             file, dump));
  ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
  EXPECT_THAT(run.out, HasSubstr("cache seeded rows"));
  EXPECT_THAT(run.out, HasSubstr("omitted: dp-ep:4: 3 sequences are fewer than the 4 ranks"));
  EXPECT_THAT(run.out, HasSubstr("the cache stands 2 times: tpa of 2 ranks"));
  const json report = json_at(file);
  EXPECT_TRUE(report.at("good").get<bool>());
  EXPECT_EQ(report.at("phase"), "decode");
  EXPECT_GT(report.at("max_abs_reference"), 0.01);
  EXPECT_GE(report.at("layouts").size(), 10u);
  for (const json& l : report.at("layouts")) {
    EXPECT_TRUE(l.at("bytes_agree").get<bool>()) << l.dump();
    EXPECT_EQ(l.at("bytes_sent_per_rank_per_token"), l.at("bytes_predicted_per_rank_per_token"));
    EXPECT_GT(l.at("seconds_per_token"), 0);
    EXPECT_TRUE(l.at("within_bound").get<bool>() || !l.at("exact").get<bool>()) << l.dump();
    EXPECT_EQ(l.at("ranks").size(), 4u);
    EXPECT_GT(l.at("ranks")[0].at("seconds_by_part").at("attention"), 0) << l.at("layout");
  }
  // One layer's latent row is 64 + 16 float32; 3 layers, 3 sequences; 153 positions are 3 pages of 64 a sequence on one
  // slice, and 1 of each slice of four.
  EXPECT_EQ(layout_of(report, "tp:4").at("cache_bytes_per_rank"), 3 * 3 * 3 * 64 * 80 * 4);
  EXPECT_EQ(layout_of(report, "helix:kvp=4,tpa=1,tpf=4,ep=1").at("cache_bytes_per_rank"), 3 * 3 * 64 * 80 * 4);
  EXPECT_TRUE(std::filesystem::exists(dump + "/helix:kvp=4,tpa=1,tpf=4,ep=1/rank3.safetensors"));
}

TEST(CompareDecode, TakesRealTextAndGroupedQueryAttention) {
  const auto run = run_isomer(
      "compare --phase decode --model tiny-mla --context 40 --cache text --tokens 2 --ranks 2 "
      "--layouts 'tp:2;helix:kvp=2,tpa=1;gla:g=2'");
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
  EXPECT_THAT(run.out, HasSubstr("cache the novel"));
  EXPECT_THAT(run.out, HasSubstr("not exact"));
}

TEST(CompareDecode, DryRunsCountAMillionTokensOnSixtyFourRanks) {
  const TempFolder folder;
  const std::string file = (folder.path() / "report.json").string();
  for (const std::string model : {"deepseek-r1", "llama-3.1-405b"}) {
    const auto run =
        run_isomer(fmt::format("compare --phase decode --model {} --context 1M --batch 64 --layouts all --ranks 64 "
                               "--dtype bf16 --dry-run --json {}",
                               model, file));
    ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
    const json report = json_at(file);
    if (model != "deepseek-r1") {
      EXPECT_GT(layout_of(report, "pp:64").at("bytes_sent_per_rank_per_token"), 0);
    }
    for (const json& l : report.at("layouts")) {
      EXPECT_TRUE(l.at("bytes_agree").get<bool>()) << l.at("layout");
      EXPECT_TRUE(l.at("seconds_per_token").is_null());
    }
    if (model != "deepseek-r1") continue;
    const json& helix = layout_of(report, "helix:kvp=64,tpa=1,tpf=64,ep=1");
    // 61 layers of 63 slices · 2 own heads · (512·2 + 4) bytes, and two all-reduces of 7168 elements on 64 ranks.
    const double all_reduce = 7168 * 2 * 2 * 63.0 / 64;
    EXPECT_EQ(helix.at("bytes_sent_per_rank_per_token"), 61 * (63 * 2 * (512 * 2 + 4) + 2 * all_reduce));
    // ⌈(1M + 4)/64⌉ positions in chunks of 16, 576 elements.
    EXPECT_EQ(helix.at("cache_bytes_per_rank"), 61ll * 64 * (16384 + 4) * 576 * 2);
  }
}

TEST(CompareDecode, RefusesWhatDoesNotGoTogether) {
  const auto refused = [](const std::string& options) {
    const auto run = run_isomer("compare --model tiny-mla " + options);
    EXPECT_EQ(run.exit_code, 2) << options;
    return run.err;
  };
  EXPECT_THAT(refused("--phase decode --seq 16"), HasSubstr("--seq does nothing with --phase decode"));
  EXPECT_THAT(refused("--context 16"), HasSubstr("--context does nothing with --phase train"));
  EXPECT_THAT(refused("--phase decode --layouts laga:2"), HasSubstr("decode layout 'laga' is unknown"));
  EXPECT_THAT(refused("--phase decode --layouts helx:kvp=2"), HasSubstr("did you mean helix?"));
  for (const std::string nothing : {"''", "' '"}) {
    EXPECT_THAT(refused("--phase decode --layouts " + nothing),
                AllOf(HasSubstr("--layouts is empty"), HasSubstr("helix"), Not(HasSubstr("laga"))));
  }
  EXPECT_THAT(refused("--phase decode --layouts 'tp:2;'"), Not(HasSubstr("laga")));
  EXPECT_THAT(refused("--phase decode --layouts helix:kvp=32,tpa=1"), HasSubstr("each needs a query head of its own"));
  EXPECT_THAT(refused("--phase decode --layouts 'tp:2;tp:2'"), HasSubstr("given twice"));
  EXPECT_THAT(refused("--phase decode --context 1000M --batch 4096"), HasSubstr("take --dry-run"));
  EXPECT_THAT(refused("--phase decode --dry-run --cache text"), HasSubstr("caches nothing"));
  EXPECT_THAT(refused("--phase decode --dry-run --link 5us,2GB/s"), HasSubstr("a dry run takes no time"));
  EXPECT_THAT(refused("--phase decode --layouts helix:kvp=2,absorb=before"), HasSubstr("with q=gather alone"));
  EXPECT_THAT(refused("--phase decode --layouts dp-ep:3 --batch 3"), HasSubstr("or cut columns: dp-ep:3,tpf=3"));
}

TEST(CompareDecode, SaysWhereItsBoundSaysLittle) {
  DecodeCompareReport report{.max_reference = 10};
  report.layouts = {{.bound = 0.9}, {.bound = 0.5}};
  EXPECT_FALSE(report.bound_says_little());
  report.layouts[1].bound = 1.1;
  EXPECT_TRUE(report.bound_says_little());
}

TEST(CompareDecode, SaysThatAShortTextIsRepeated) {
  const TempFolder folder;
  folder.write("short.txt", "It is a truth");
  const auto run = run_isomer(fmt::format(
      "compare --phase decode --model tiny-mla --layouts tp:1 --context 64 --tokens 1 --cache text --text {}/short.txt",
      folder.path().string()));
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("short.txt, repeated"));
}

/// What the root of medha does stands in its row, though its slices send more.
TEST(CompareDecode, PartsAreOfTheRankThatOthersWaitFor) {
  DecodeRun run;
  run.ranks = {{.rank = 0, .seconds_waiting = 1}, {.rank = 1, .bytes_by_name = {{"x", 9}}, .seconds_waiting = 3}};
  EXPECT_EQ(run.busiest().rank, 1);
  EXPECT_EQ(run.critical().rank, 0);
}

TEST(CompareDecode, PassesOverBlanksAsTrainingDoes) {
  const auto run =
      run_isomer("compare --phase decode --layouts ' tp:2 ; helix: kvp=2,tpa=1;dp-ep:2' --batch 2 --dry-run");
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("\ntp:2  "), HasSubstr("\nhelix:kvp=2,tpa=1  "), HasSubstr("\ndp-ep:2  ")));
}

/// Where latency is longer than the attention that would hide a message.
TEST(CompareDecode, SaysWhereOverlapCostsMoreThanItHides) {
  const TempFolder folder;
  const std::string file = (folder.path() / "report.json").string();
  const auto note = [&](const std::string& options, const std::string& layout) {
    const auto run = run_isomer(fmt::format("compare --phase decode --context 200 --tokens 2 --json {} --layouts {} {}",
                                            file, layout, options));
    EXPECT_EQ(run.exit_code, 0) << run.err;
    const std::string in_json = layout_of(json_at(file), layout).at("note");
    EXPECT_TRUE(in_json.empty() || run.out.find(layout + ": " + in_json + "\n") != std::string::npos) << run.out;
    return in_json;
  };
  const std::string helix = "helix:kvp=2,tpa=1";
  EXPECT_THAT(note("--batch 3 --link 50ms,10GB/s", helix), HasSubstr("hopb=off, one message for all, is quicker"));
  EXPECT_EQ(note("--batch 1 --link 50ms,10GB/s", helix), "");
  EXPECT_EQ(note("--batch 3 --link 50ms,10GB/s", helix + ",hopb=off"), "");
  EXPECT_EQ(note("--batch 3 --link 1ns,10GB/s", helix), "");
  EXPECT_EQ(note("--batch 3", helix), "");
}

/// Parts are of one step, the one whose time is shown.
TEST(CompareDecode, PartsOfAStepNeverExceedIt) {
  const TempFolder folder;
  const std::string file = (folder.path() / "report.json").string();
  for (const int ranks : {2, 4}) {
    const auto run = run_isomer(fmt::format(
        "compare --phase decode --context 60 --batch 2 --tokens 9 --ranks {} --layouts all --json {}", ranks, file));
    ASSERT_EQ(run.exit_code, 0) << run.err;
    for (const json& l : json_at(file).at("layouts")) {
      for (const json& rank : l.at("ranks")) {
        double sum = rank.at("seconds_waiting");
        for (const auto& [part, seconds] : rank.at("seconds_by_part").items()) sum += seconds.get<double>();
        EXPECT_LE(sum, rank.at("seconds_per_token").get<double>() * (1 + 1e-9)) << l.at("layout") << rank.dump();
        EXPECT_LE(rank.at("seconds_per_token"), l.at("seconds_per_token")) << l.at("layout");
      }
    }
  }
}

TEST(CompareDecode, ListsEveryFamilyOnceForAnyNumberOfRanks) {
  for (const char* model : {"tiny-mla", "smollm2-135m"}) {
    const ModelConfig config = load_model_config(model);
    for (int ranks = 1; ranks <= 9; ++ranks) {
      std::set<std::string> names;
      for (const std::string& text : all_decode_layouts(config, ranks)) {
        const DecodeLayout layout = parse_decode_layout(text, config);
        EXPECT_EQ(layout.devices(), ranks) << text;
        EXPECT_TRUE(names.insert(to_string(layout)).second) << text << " is listed twice";
      }
      EXPECT_GE(names.size(), ranks > 1 ? 7u : 1u) << model << " " << ranks;
    }
  }
}

TEST(CompareDecode, NamesThePartsOfAStep) {
  EXPECT_EQ(decode_part_of("fused_attention_forward"), "attention");
  EXPECT_EQ(decode_part_of("merge_packed_attention"), "exchange");
  EXPECT_EQ(decode_part_of("q_b_proj"), "projections");
  EXPECT_EQ(decode_part_of("shared gate_proj"), "ffn");
  EXPECT_EQ(decode_part_of("router gate"), "router");
  EXPECT_EQ(decode_part_of("lm_head"), "other");
}

}  // namespace
}  // namespace isomer
