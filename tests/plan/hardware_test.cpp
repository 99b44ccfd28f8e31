#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "model/json_text.h"
#include "plan/builtin_hardware.h"
#include "plan/curves.h"
#include "plan/hardware.h"
#include "plan/hardware_json.h"

namespace isomer {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json plain() {
  return json::parse(R"({"schema_version": 1, "name": "box", "description": "a box",
    "memory": {"bandwidth_bytes_per_s": 1e12, "capacity_bytes": 8e10},
    "flops_per_s": {"f32": 1e13, "bf16": 1e14},
    "links": [{"name": "near", "devices": 8, "latency_s": 1e-6, "bandwidth_bytes_per_s": 1e11},
              {"name": "far", "devices": 64, "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e10}],
    "figures": [{"figure": "memory", "source": "data sheet", "doubt": "another sheet says 2"}],
    "curves": [{"operation": "gemm", "compute": "bf16", "storage": "bf16", "launch_s": 1e-6, "compute_share": 0.5,
                "bytes_share": 0.5, "exponent": 2,
                "surfaces": [{"axes": [{"feature": "log2_m", "first": 0, "step": 2, "count": 3}],
                              "values": [0.1, 0.2, 0.3]}]}]})");
}

template <class Exception, class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

std::string complaint(const json& object) {
  return message_of<Error>([&] { parse_hardware(object, "box"); });
}

TEST(Hardware, EveryBuiltInHasFiguresSourcesAndPlausibleRates) {
  const auto names = builtin_hardware_names();
  for (const char* name :
       {"gb200-nvl72", "gb300-nvl72", "b200", "h200", "h100", "a100", "h800", "mi300x", "ascend-910b"})
    EXPECT_THAT(names, testing::Contains(name));
  for (const auto& name : names) {
    const Hardware hardware = load_hardware(name);
    EXPECT_EQ(hardware.name, name);
    EXPECT_GE(hardware.sources.size(), 4u) << name;
    EXPECT_GE(hardware.doubts.size(), 2u) << name;
    EXPECT_GE(hardware.tiers.size(), 2u) << name;
    ASSERT_NE(hardware.curves, nullptr) << name;
    EXPECT_EQ(hardware.fitted, name == "gb200-nvl72" || name == "b200" || name == "h200") << name;
    for (int p = 1; p < kNumPrecisions; ++p) {
      const double rate = hardware.flops_per_s[static_cast<std::size_t>(p)];
      EXPECT_TRUE(rate == 0 || rate >= hardware.flops_per_s[static_cast<std::size_t>(p - 1)]) << name;
    }
    // A dense product of so many operations a byte is bound by arithmetic on every one of them.
    EXPECT_GT(hardware.peak_flops_per_s(Precision::bf16) / hardware.memory_bandwidth_bytes_per_s, 100) << name;
    EXPECT_LT(hardware.peak_flops_per_s(Precision::bf16) / hardware.memory_bandwidth_bytes_per_s, 400) << name;
  }
}

TEST(Hardware, UnknownNameSuggestsNearOnes) {
  const auto text = message_of<std::invalid_argument>([] { load_hardware("gb200-nvl27"); });
  EXPECT_THAT(text, HasSubstr("did you mean gb200-nvl72"));
  EXPECT_THAT(text, HasSubstr("Built in: a100"));
  EXPECT_THAT(message_of<std::invalid_argument>([] { load_hardware("H100"); }), HasSubstr("did you mean h100"));
  EXPECT_THAT(message_of<std::invalid_argument>([] { load_hardware("\x01 abacus"); }), HasSubstr("\\x01"));
}

TEST(Hardware, ReadsWhatStands) {
  const Hardware hardware = parse_hardware(plain(), "box");
  EXPECT_EQ(hardware.memory_bandwidth_bytes_per_s, 1e12);
  EXPECT_EQ(hardware.peak_flops_per_s(Precision::nvfp4), 0);
  EXPECT_EQ(hardware.compute_precision(Precision::nvfp4), Precision::bf16);
  EXPECT_EQ(hardware.compute_precision(Precision::f32), Precision::f32);
  EXPECT_EQ(hardware.tier_for(8).name, "near");
  EXPECT_EQ(hardware.tier_for(9).name, "far");
  EXPECT_EQ(hardware.tier_for(1000).name, "far");
  EXPECT_EQ(hardware.max_devices(), 64);
  EXPECT_TRUE(hardware.fitted);
  EXPECT_THAT(hardware.doubts.front(), HasSubstr("another sheet says 2"));
}

TEST(Hardware, CollectivesBeyondTheirMeasurementsAreInDoubt) {
  const auto doubts = load_hardware("gb200-nvl72").doubts;
  EXPECT_THAT(doubts, testing::Contains("all_reduce: measured on up to 4 devices, extrapolated to 72"));
  EXPECT_THAT(load_hardware("h200").doubts, testing::Not(testing::Contains(HasSubstr("extrapolated"))));
}

TEST(Hardware, FileOfADescriptionReadsBackTheSame) {
  const std::string text = hardware_text(plain());
  EXPECT_EQ(parse_json(text, "text"), plain());
  const auto curves = parse_hardware(plain(), "box").curves;
  const json again = with_curves(plain(), curves->all(), {{"data", "none"}});
  EXPECT_EQ(again["curves"][0]["surfaces"], plain()["curves"][0]["surfaces"]);
}

struct BadInput {
  const char* pointer;
  json value;  // discarded: the key is removed
  const char* expected;
};

class HardwareBadInput : public testing::TestWithParam<BadInput> {};

TEST_P(HardwareBadInput, IsNamedWithKeyValueAndLimit) {
  json object = plain();
  const json::json_pointer at(GetParam().pointer);
  if (GetParam().value.is_discarded()) {
    object.at(at.parent_pointer()).erase(at.back());
  } else {
    object[at] = GetParam().value;
  }
  const std::string text = complaint(object);
  EXPECT_THAT(text, HasSubstr(GetParam().expected));
  EXPECT_THAT(text, HasSubstr("box"));
}

const json kRemoved(json::value_t::discarded);

INSTANTIATE_TEST_SUITE_P(
    All, HardwareBadInput,
    testing::Values(
        BadInput{"/memory/bandwidth_bytes_per_s", -1, "bandwidth_bytes_per_s = -1: expected a number from 1e+08"},
        BadInput{"/memory/bandwidth_bytes_per_s", 8, "bandwidth_bytes_per_s = 8"},  // TB/s were meant
        BadInput{"/memory/bandwidth_bytes_per_s", "8 TB/s", "expected a number"},
        BadInput{"/memory/capacity_bytes", kRemoved, "capacity_bytes is missing"},
        BadInput{"/memory", json::array(), "expected an object"}, BadInput{"/flops_per_s", kRemoved, "is missing"},
        BadInput{"/flops_per_s/f16", 1e14, "f16: unknown key"}, BadInput{"/flops_per_s/bf16", 0, "bf16 = 0"},
        BadInput{"/bandwith", 1, "bandwith: unknown key; known are"},
        BadInput{"/schema_version", 2, "schema_version = 2"}, BadInput{"/links", 3, "links = 3: expected a list"},
        BadInput{"/links/0/latency_s", 5, "latency_s = 5"}, BadInput{"/links/0/latency_s", -1e-6, "latency_s"},
        BadInput{"/links/1/devices", 8, "devices = 8: expected more than the 8"},
        BadInput{"/links/0/devices", 1.5, "devices = 1.5"},
        BadInput{"/figures/0/source", kRemoved, "source is missing"}, BadInput{"/curves_from", "h200", "curves_from"},
        BadInput{"/curves/0/operation", "gem", "one of gemm, moe"},
        BadInput{"/curves/0/compute", "fp16", "one of f32, bf16, fp8, nvfp4"},
        BadInput{"/curves/0/compute_share", 0, "compute_share = 0"},
        BadInput{"/curves/0/exponent", -2, "exponent = -2"}, BadInput{"/curves/0/launch_s", 2, "launch_s = 2"},
        BadInput{"/curves/0/surfaces/0/axes/0/feature", "log2_heads", "a feature of gemm"},
        BadInput{"/curves/0/surfaces/0/axes/0/count", 1000000000, "count = 1000000000"},
        BadInput{"/curves/0/surfaces/0/axes", json::array(), "1 to 3 axes"},
        BadInput{"/curves/0/surfaces/0/values", json::array({1, 2}), "an array of 3 numbers"},
        BadInput{"/curves/0/surfaces/0/values/1", 1e300, "values[1] = 1e+300"}));

TEST(Hardware, CurvesAreBorrowedOnlyFromHardwareThatHasThem) {
  json object = plain();
  object.erase("curves");
  object["curves_from"] = "h200";
  const Hardware hardware = parse_hardware(object, "box");
  EXPECT_FALSE(hardware.fitted);
  EXPECT_EQ(hardware.curves_from, "h200");
  EXPECT_THAT(hardware.doubts.back(), HasSubstr("those of h200"));
  object["curves_from"] = "h100";
  EXPECT_THAT(complaint(object), HasSubstr("with curves of its own"));
  object["curves_from"] = "../../etc/passwd";
  EXPECT_THAT(complaint(object), HasSubstr("expected built-in hardware"));
}

TEST(Hardware, HostileFilesAreErrorsWithTheirName) {
  const std::string path = testing::TempDir() + "hostile.json";
  const auto load = [&](const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
    return message_of<Error>([&] { load_hardware(path); });
  };
  for (const std::string& text : {std::string(100000, '['), std::string(R"({"name": NaN})"), std::string("\xff\xfe{}"),
                                  std::string(), std::string("null"), std::string(R"({"schema_version": 1e999})"),
                                  plain().dump() + "x", std::string(R"({"name": 1, "name": 2})")}) {
    EXPECT_THAT(load(text), HasSubstr("hostile.json")) << text.substr(0, 40);
  }
  EXPECT_THAT(message_of<Error>([] { load_hardware(testing::TempDir()); }), testing::Not(HasSubstr("nothing")));
}

TEST(Hardware, AssumptionsOutOfRangeAreNamed) {
  const Hardware hardware = parse_hardware(plain(), "box");
  const auto with = [&](const Assumptions& a) {
    return message_of<std::invalid_argument>([&] { with_assumptions(hardware, a); });
  };
  EXPECT_THAT(with({.link_bandwidth_factor = 0}), HasSubstr("link_bandwidth_factor = 0"));
  EXPECT_THAT(with({.fp4_efficiency = -1}), HasSubstr("fp4_efficiency = -1"));
  EXPECT_THAT(with({.overlap_contention = 0.5}), HasSubstr("overlap_contention = 0.5: must be a finite number of at"));
  EXPECT_THAT(with({.link_latency_s = -1}), HasSubstr("link_latency_s = -1"));
  EXPECT_THAT(with({.fp4_efficiency = std::nan("")}), HasSubstr("fp4_efficiency = nan"));
}

TEST(HardwareFiles, FittedOnesStandAsTheProgramWritesThem) {
  int fitted = 0;
  for (const auto& hardware : builtin_hardware()) {
    if (!load_hardware(std::string(hardware.name)).fitted) continue;
    ++fitted;
    EXPECT_EQ(hardware_text(parse_json(hardware.json, hardware.name)), hardware.json) << hardware.name;
  }
  EXPECT_EQ(fitted, 3);
}

}  // namespace
}  // namespace isomer
