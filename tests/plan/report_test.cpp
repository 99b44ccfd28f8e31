// What a plan says: JSON, the page, impossible limits, and the page in a real browser.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "plan/decode_report.h"
#include "plan/html_report.h"
#include "plan/train_report.h"

namespace isomer {
namespace {

DecodePlanOptions options_of(std::int64_t context, int devices) {
  DecodePlanOptions o{.hardware = load_hardware("gb200-nvl72")};
  o.problem = {.config = load_model_config("deepseek-r1"),
               .context = context,
               .precision = {Precision::nvfp4, Precision::fp8, Precision::bf16}};
  o.search = {.max_devices = devices, .batches = {1, 2, 4, 8, 16, 32, 64}, .include_inexact = true};
  return o;
}

const DecodePlan& small_plan() {
  static const DecodePlan plan = plan_decode(options_of(1 << 17, 16));
  return plan;
}

const nlohmann::json& train_json() {
  static const nlohmann::json json = [] {
    TrainPlanOptions o{.problem = {.config = load_model_config("deepseek-v2-lite"), .seq = 16384, .batch = 64},
                       .hardware = load_hardware("h100"),
                       .devices = 16};
    return to_json(plan_train(std::move(o)));
  }();
  return json;
}

std::string complaint_of(DecodePlanOptions options) {
  try {
    plan_decode(std::move(options));
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(DecodePlan, ChoosesWhatItSays) {
  const DecodePlan& plan = small_plan();
  ASSERT_GE(plan.chosen.size(), 3u);
  for (const ChosenLayout& c : plan.chosen) {
    EXPECT_TRUE(plan.search.layout_of(c.point).shards.is_exact()) << c.layout;
    EXPECT_NEAR(c.time.total(), c.point.step_s, 1e-12) << c.layout;
    EXPECT_FALSE(c.bound.empty());
    EXPECT_LE(c.memory.total(), plan.assumed.memory_capacity_bytes) << c.layout;
  }
  EXPECT_EQ(plan.chosen[0].point.per_device(), plan.overall.back().per_device());
  EXPECT_EQ(plan.chosen[1].point.step_s, plan.overall.front().step_s);
  bool inexact = false;
  for (const FamilyFrontier& f : plan.frontiers) inexact = inexact || !f.exact;
  EXPECT_TRUE(inexact) << "asked for, so it is shown";
}

TEST(DecodePlan, IntervalsHoldTheirBase) {
  ASSERT_TRUE(small_plan().sensitivity.has_value());
  const Sensitivity& s = *small_plan().sensitivity;
  EXPECT_LE(s.lowest.interactivity, s.base.interactivity);
  EXPECT_GE(s.highest.interactivity, s.base.interactivity);
  EXPECT_LE(s.lowest.throughput, s.base.throughput);
  EXPECT_GE(s.highest.throughput, s.base.throughput);
  for (std::size_t i = 0; i < s.rows.size(); ++i) {
    EXPECT_EQ(s.rows[i].ends.size(), 2u);
    if (i == 0) continue;
    const auto weight = [](const SensitivityRow& r) {
      return std::max(r.spread_interactivity(), r.spread_throughput());
    };
    EXPECT_GE(weight(s.rows[i - 1]), weight(s.rows[i])) << "what matters most comes first";
  }
}

TEST(DecodePlan, RatiosAreThoseOfTheFrontiers) {
  const auto point = [](double step_s, std::int64_t batch) { return DecodePoint{0, 1, batch, step_s}; };
  // Theirs: 10 a second within 0.1 s, 40 within 0.2 s. Ours: 20 within 0.05 s, 60 within 0.1 s.
  const std::vector<DecodePoint> theirs = {point(0.1, 1), point(0.2, 8)}, ours = {point(0.05, 1), point(0.1, 6)};
  const LayoutRatios r = ratios_of(ours, theirs);
  EXPECT_DOUBLE_EQ(r.interactivity, 2);
  EXPECT_DOUBLE_EQ(r.throughput, 6);
  EXPECT_DOUBLE_EQ(r.at_step_s, 0.1);
  EXPECT_EQ(ratios_of({}, theirs).interactivity, 0);
  EXPECT_EQ(ratios_of(ours, {}).throughput, 0);
}

TEST(DecodePlan, JsonHasWhatThePageNeeds) {
  const nlohmann::json json = to_json(small_plan());
  EXPECT_EQ(json.at("command"), "plan decode");
  EXPECT_GT(json.at("frontiers").size(), 3u);
  EXPECT_TRUE(json.at("frontiers")[0].at("points")[0].at("tokens_per_s_per_user").is_number());
  EXPECT_TRUE(json.at("chosen")[0].at("time")[0].at("seconds").is_number());
  EXPECT_EQ(json.at("configurations").at("examined"), small_plan().search.examined);
  EXPECT_TRUE(json.contains("sensitivity"));
}

TEST(DecodePlan, SaysWhichLimitBindsAndWhatIsNearest) {
  DecodePlanOptions quick = options_of(1 << 17, 16);
  quick.ttl_s = 1e-6;
  quick.sensitivity = false;
  const std::string ttl = complaint_of(quick);
  EXPECT_NE(ttl.find("--ttl"), std::string::npos);
  EXPECT_NE(ttl.find("The quickest, "), std::string::npos);
  // The limit it names can be met.
  const auto at = ttl.rfind("--ttl ") + 6;
  quick.ttl_s = std::stod(ttl.substr(at)) / 1e3;
  EXPECT_NO_THROW(plan_decode(quick));

  const std::string memory = complaint_of(options_of(1 << 20, 1));
  EXPECT_NE(memory.find("memory binds"), std::string::npos) << memory;
  EXPECT_NE(memory.find("tp:1"), std::string::npos) << memory;
  // The number of devices that it names is enough, and half of it is not.
  const auto give = memory.find("give it ");
  ASSERT_NE(give, std::string::npos) << memory;
  const int devices = std::stoi(memory.substr(give + 8));
  DecodePlanOptions more = options_of(1 << 20, devices);
  more.sensitivity = false;
  EXPECT_NO_THROW(plan_decode(more));
  EXPECT_NE(complaint_of(options_of(1 << 20, devices / 2)).find("memory binds"), std::string::npos);
  DecodePlanOptions hopeless = options_of(1 << 20, 1);
  hopeless.problem.memory_limit_bytes = 1e6;
  EXPECT_NE(complaint_of(hopeless).find("no layout fits on up to 1152 devices"), std::string::npos);

  DecodePlanOptions impossible = options_of(1024, 8);
  impossible.search.layouts = {parse_decode_layout("tp:3", impossible.problem.config)};
  EXPECT_NE(complaint_of(impossible).find("heads do not divide"), std::string::npos);
}

TEST(HtmlReport, IsOneFileThatAsksForNothing) {
  const std::string page = plan_html(to_json(small_plan()));
  for (const char* outside : {"src=\"http", "href=\"http", "url(http", "@import", "src='http"}) {
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
  EXPECT_NE(page.find("Chart.js v3"), std::string::npos);
  EXPECT_NE(page.find("MIT licence"), std::string::npos);
  EXPECT_EQ(page.find("{{"), page.find("{{", page.find("Chart.js v3"))) << "no place is left open before the library";
}

TEST(HtmlReport, DataCannotEndTheScript) {
  EXPECT_EQ(script_safe("{\"a\":\"</script><script>\"}").find('<'), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(script_safe("{\"a\":\"</b>\"}")).at("a"), "</b>");
  nlohmann::json json = to_json(small_plan());
  json["model"] = "</script>{{CHART}}{{DATA}}\xff";
  EXPECT_EQ(plan_html(json).find("</script>{{CHART}}"), std::string::npos);
}

/// What a headless browser makes of a page: the document once its scripts have run, and its log.
std::string opened(const std::filesystem::path& page) {
  const std::string command = fmt::format(
      "timeout 120 chromium --headless --no-sandbox --disable-gpu --user-data-dir={}/profile "
      "--enable-logging=stderr --virtual-time-budget=5000 --dump-dom file://{} 2>&1",
      page.parent_path().string(), page.string());
  std::string output;
  FILE* pipe = popen(command.c_str(), "r");
  std::array<char, 4096> buffer{};
  while (const std::size_t count = fread(buffer.data(), 1, buffer.size(), pipe)) output.append(buffer.data(), count);
  pclose(pipe);
  return output;
}

class Browser : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::system("command -v chromium > /dev/null 2>&1") != 0) {
      GTEST_SKIP() << "chromium is not installed (./dev setup browser)";
    }
    folder_ = std::filesystem::temp_directory_path() / fmt::format("isomer-report-{}", getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  std::string open(const std::string& page) {
    std::ofstream(folder_ / "report.html") << page;
    return opened(folder_ / "report.html");
  }
  /// The page in a window of `width` pixels: how far right its elements reach, and who reaches furthest.
  std::string widest(const std::string& page, int width) {
    const std::string frame = fmt::format(R"html(<!DOCTYPE html><body>
<iframe id="frame" style="width: {0}px; height: 800px; border: 0"></iframe>
<script type="application/json" id="page">{1}</script>
<script>
const frame = document.getElementById("frame");
frame.onload = () => setTimeout(() => {{
  const inner = frame.contentDocument;
  let right = 0, who = "";
  for (const element of inner.body.querySelectorAll("*")) {{
    const box = element.getBoundingClientRect();
    if (box.width === 0 || box.right <= right) continue;
    right = box.right;
    who = element.tagName + " " + element.textContent.slice(0, 40);
  }}
  document.body.dataset.inner = inner.body.dataset.report;
  document.body.dataset.fits = Math.max(right, inner.documentElement.scrollWidth) <= {0} + 0.5;
  document.body.dataset.who = who + ", to " + right;
}}, 500);
frame.srcdoc = JSON.parse(document.getElementById("page").textContent);
</script>)html",
                                          width, script_safe(nlohmann::json(page).dump()));
    return open(frame);
  }
  std::filesystem::path folder_;
};

TEST_F(Browser, DrawsTheReportWithoutAnError) {
  const std::string document = open(plan_html(to_json(small_plan())));
  EXPECT_NE(document.find("data-report=\"ready\""), std::string::npos) << document.substr(0, 2000);
  EXPECT_EQ(document.find("Uncaught"), std::string::npos);
  EXPECT_NE(document.find(small_plan().chosen[0].layout), std::string::npos);
  EXPECT_NE(document.find("What the ratios depend on"), std::string::npos);
}

TEST_F(Browser, DrawsTheTrainingReportWithoutAnError) {
  const std::string document = open(plan_html(train_json()));
  EXPECT_NE(document.find("data-report=\"ready\""), std::string::npos) << document.substr(0, 2000);
  EXPECT_EQ(document.find("Uncaught"), std::string::npos);
  EXPECT_NE(document.find(train_json()["chosen"][0]["layout"].get<std::string>()), std::string::npos);
  for (const char* what : {"Schemes by ranks of a sequence", "Priced, not executed", "What it depends on", "Next: "}) {
    EXPECT_NE(document.find(what), std::string::npos) << what;
  }
}

TEST_F(Browser, NothingIsWiderThanAPhone) {
  for (const nlohmann::json& plan : {to_json(small_plan()), train_json()}) {
    for (const int width : {375, 700}) {
      const std::string document = widest(plan_html(plan), width);
      EXPECT_NE(document.find("data-inner=\"ready\""), std::string::npos) << width;
      const auto who = document.find("data-who");
      EXPECT_NE(document.find("data-fits=\"true\""), std::string::npos)
          << plan["command"] << " at " << width << ": " << document.substr(std::min(who, document.size()), 120);
    }
  }
}

TEST_F(Browser, SeesAScriptError) {
  nlohmann::json broken = to_json(small_plan());
  broken.erase("chosen");
  const std::string document = open(plan_html(broken));
  EXPECT_NE(document.find("data-report=\"failed\""), std::string::npos);
  EXPECT_NE(document.find("could not be drawn"), std::string::npos);
}

}  // namespace
}  // namespace isomer
