"use strict";
report.views["plan decode"] = function (plan) {
  const r = report;
  const colours = { "tp": "#5b6570", "dp-ep": "#1f77b4", "kvp": "#d98c00", "medha": "#8e5ea2", "helix": "#c0392b",
                    "exact-latent": "#2e8b57", "tpla": "#17a2b8", "gla": "#a0522d" };
  r.title(plan.model + " on " + plan.hardware + ", " + r.tokens(plan.context) + " tokens of context",
          "Decoding on up to " + plan.max_devices + " devices; weights " + plan.precision.weights + ", cache " +
          plan.precision.cache + ", exchanged in " + plan.precision.activations + "; " + r.efficiencies(plan) + ". " +
          r.counts(plan.configurations));

  r.lines(r.section("Frontiers", "Each point is a layout and a batch that no other of its family beats in both speed for " +
                    "a user and throughput of a device. Right is quicker, up is cheaper. Dashed: not exact, never chosen " +
                    "by default."),
          "frontiers by family",
          plan.frontiers.map((f) => ({
            label: f.family + (f.exact ? "" : " (not exact)"), dashed: !f.exact, colour: colours[f.family] || "#333",
            points: f.points.map((p) => ({ x: p.tokens_per_s_per_user, y: p.tokens_per_s_per_device, point: p })) })),
          { x: r.logarithmic("tokens/s of a user"), y: r.logarithmic("tokens/s of a device") },
          (p) => ["batch " + p.batch + " on " + p.devices + " devices, " + r.time(p.step_s) + " a token",
                  r.number(p.tokens_per_s_per_user) + " tokens/s a user, " + r.number(p.tokens_per_s_per_device) +
                  " tokens/s a device"],
          "scatter");

  const chosen = r.section("Chosen layouts");
  plan.chosen.forEach((p) => {
    const m = p.memory_bytes;
    r.card(chosen, p, [
      "batch " + p.batch + " on " + p.devices + " devices: " + r.time(p.step_s) + " a token, " +
        r.number(p.tokens_per_s_per_user) + " tokens/s a user, " + r.number(p.tokens_per_s_per_device) +
        " tokens/s a device. Bound by " + p.bound + ".",
      "Memory of a device: weights " + r.bytes(m.weights) + ", cache " + r.bytes(m.cache) + ", workspace " +
        r.bytes(m.workspace) + "."],
      p.next && " at batch " + p.next.batch + ", " + r.number(p.next.tokens_per_s_per_device) + " tokens/s a device, " +
        r.time(p.next.step_s) + " a token");
  });
  r.breakdown(r.section("Where a step goes"), plan.chosen);
  r.operations(plan.chosen[0]);

  const s = plan.sensitivity;
  if (s) {
    const times = (name) => ({ base: s.base[name], lowest: s.lowest[name], highest: s.highest[name] });
    const part = r.section("What the ratios depend on");
    r.element("p", "Helix against the best of TP, PP, EP, DP attention and Medha: " + r.interval(times("interactivity")) +
      " in the speed of the quickest layout, up to " + r.interval(times("throughput")) + " in throughput within the same " +
      "time a token. The assumption that matters most comes first.", part);
    r.table(part, ["assumption", "from", "speed", "throughput", "to", "speed", "throughput"],
            s.rows.map((row) => [row.assumption].concat(...row.ends.map((e) => [
              e.value, r.number(e.ratios.interactivity) + "×", r.number(e.ratios.throughput) + "×"]))));
  }
  r.omitted(plan.configurations);
};
