"use strict";
report.views["plan train"] = function (plan) {
  const r = report;
  const colours = { "without SP": "#1b1f24", "explicit": "#5b6570", "ring": "#8fbbe0", "explicit,ring": "#1f77b4",
                    "explicit-shared-rope": "#d98c00", "absorbed": "#8e5ea2", "absorbed-two-product": "#c9a0dc",
                    "laga": "#c0392b", "laga,kv=strided": "#e08e83", "laga,kv=rebuild": "#e6b566",
                    "latent-gather": "#2e8b57", "latent-ring": "#7fc99b", "laga,ring": "#a0522d",
                    "laga,latent-ring": "#17a2b8" };
  const label = (f) => f.family + (f.baseline ? " (baseline)" : "");
  const line = (f, at) => ({ label: label(f), dashed: f.baseline, colour: colours[f.family] || "#333",
                             points: f.points.map((p) => ({ x: at(p), y: p.tokens_per_s_per_device, point: p })) });
  const describe = (p) => [r.time(p.step_s) + " a step, " + r.number(p.tokens_per_s_per_device) + " tokens/s a device, " +
                           r.bytes(p.memory_total_bytes) + " of memory",
                           p.ranks + (p.ranks === 1 ? " rank" : " ranks") + " a sequence; " +
                           (p.priced_not_executed ? "priced in part, not executed" : "executed")];
  r.title(plan.model + " on " + plan.devices + " × " + plan.hardware + ", " + r.tokens(plan.seq) + " tokens a sequence",
          "Training with " + r.number(plan.batch, 9) + " sequences a step; " + r.efficiencies(plan) + ". " +
          r.counts(plan.configurations));

  const sizes = [...new Set(plan.by_ranks.flatMap((f) => f.points.map((p) => p.ranks)))].sort((a, b) => a - b);
  r.lines(r.section("Schemes by ranks of a sequence", "The quickest layout of every scheme on so many sequence-parallel " +
                    "ranks, whatever is around it. Up is quicker. Dashed: baselines, in use before latents travelled."),
          "tokens a second of a device by scheme and ranks", plan.by_ranks.map((f) => line(f, (p) => String(p.ranks))),
          { x: { title: { display: true, text: "ranks that a sequence lies on" } }, y: r.linear("tokens/s of a device") },
          describe, "line", sizes.map(String));
  r.lines(r.section("Frontiers of memory", "Each point is a layout that no other of its scheme beats in both speed and " +
                    "memory of a device. Up is quicker, left fits a smaller device."),
          "frontiers by scheme", plan.frontiers.map((f) => line(f, (p) => p.memory_total_bytes / 1e9)),
          { x: r.linear("GB of a device"), y: r.linear("tokens/s of a device") }, describe, "scatter");

  const chosen = r.section("Chosen layouts", "MFU: the model's FLOPs, forward and twice that backward, over what all devices " +
                           "do at peak. What is computed again takes time and counts as no FLOPs.");
  plan.chosen.forEach((p) => {
    const m = p.memory_bytes;
    const parts = (priced) => p.time.filter((t) => t.seconds !== 0 && t.priced_not_executed === priced)
      .map((t) => t.part + " " + (t.seconds < 0 ? "−" : "") + r.time(Math.abs(t.seconds))).join(", ") || "nothing";
    r.card(chosen, p, [
      r.time(p.step_s) + " a step, " + r.number(p.tokens_per_s_per_device) + " tokens/s a device, " +
        "MFU " + r.number(100 * p.model_flops_utilisation, 2) + "\u00a0%. Bound by " + p.bound + ".",
      "Time: " + parts(false) + ". Priced, not executed: " + parts(true) + ".",
      "Memory of a device: weights " + r.bytes(m.weights) + ", gradients " + r.bytes(m.gradients) + ", optimiser " +
        r.bytes(m.optimizer) + ", saved " + r.bytes(m.saved) + ", beside them " + r.bytes(m.transient) + "."],
      p.next && ", " + r.time(p.next.step_s) + " a step, " + r.bytes(p.next.memory_total_bytes));
  });
  r.breakdown(r.section("Where a step goes", "Hatched: priced, not executed. A dry run of the executor counts what the " +
                        "rest is priced from."), plan.chosen);
  r.operations(plan.chosen[0]);

  const s = plan.sensitivity;
  if (s) {
    const part = r.section("What it depends on");
    r.element("p", "A step of the quickest layout takes " + r.time(s.step_s.base) + " (" + r.time(s.step_s.lowest) + " to " +
      r.time(s.step_s.highest) + " over all ranges below), which depends most on: " + s.step_depends_on + ".", part);
    if (s.ratio) {
      r.element("p", s.ours + " against the best baseline, " + s.theirs + ": " + r.interval(s.ratio, 4) +
        ", the best of both chosen anew at every end. What moves this ratio most comes first.", part);
    }
    r.table(part, s.ratio ? ["assumption", "from", "a step", "ratio", "to", "a step", "ratio"]
                          : ["assumption", "from", "a step", "to", "a step"],
            s.rows.map((row) => [row.assumption].concat(...row.ends.map((e) =>
              [e.value, r.time(e.step_s)].concat(s.ratio ? [r.number(e.ratio, 4) + "×"] : [])))));
    r.table(r.section("Behind the quickest", "Time of a step over that of the quickest layout, the best of each scheme " +
                      "chosen anew at every end."),
            ["scheme", "as described", "lowest", "highest"],
            s.behind.map((b) => [b.family].concat([b.base, b.lowest, b.highest].map((x) => r.number(x, 4) + "×"))));
  }
  r.omitted(plan.configurations);
};
