"use strict";
// What the views of a plan are made of: text, sections, tables, cards, and charts whose pointer names the layout.
const report = (function () {
  const views = {};
  const byId = (id) => document.getElementById(id);

  // Text. Numbers and their units stay on one line.
  const number = (x, digits) => x.toLocaleString("en", { maximumSignificantDigits: digits || 3 });
  const time = (s) => s < 1e-3 ? number(s * 1e6) + "\u00a0µs" : s < 1 ? number(s * 1e3) + "\u00a0ms" : number(s) + "\u00a0s";
  const tokens = (n) => n % 1048576 === 0 ? n / 1048576 + "M" : n % 1024 === 0 ? n / 1024 + "K" : String(n);
  const bytes = (b) => b >= 1e9 ? number(b / 1e9) + "\u00a0GB" : number(b / 1e6) + "\u00a0MB";
  const interval = (i, digits) => number(i.base, digits) + "× (" + number(i.lowest, digits) + " to " +
    number(i.highest, digits) + ")";
  const efficiencies = (plan) => plan.roofline ? "roofline alone (peak rates)" :
    plan.hardware_fitted ? "efficiencies fitted to measurements" +
      (plan.not_fitted.length ? ", but not of " + plan.not_fitted.join(", ") : "") :
      "efficiencies not measured on this device" + (plan.curves_from ? " (curves of " + plan.curves_from + ")" : "");
  const counts = (c) => number(c.examined, 9) + " configurations examined, " + number(c.priced, 9) + " priced in " +
    number(c.seconds, 2) + " s.";

  // The document.
  const element = (tag, text, parent) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  };
  const soft = (text, parent) => {
    const line = element("p", text, parent);
    line.className = "soft";
    return line;
  };
  const title = (text, below) => {
    document.title = text;
    byId("title").textContent = text;
    byId("subtitle").textContent = below;
  };
  const section = (heading, note) => {
    const part = element("section", undefined, byId("view"));
    element("h2", heading, part);
    if (note) soft(note, part);
    return part;
  };
  // Cells repeat their column's name, which a narrow screen shows beside them.
  const table = (parent, header, rows) => {
    const t = element("table", undefined, parent);
    const head = element("tr", undefined, element("thead", undefined, t));
    header.forEach((h) => element("th", h, head));
    const body = element("tbody", undefined, t);
    rows.forEach((cells) => {
      const row = element("tr", undefined, body);
      cells.forEach((c, i) => { element("td", c, row).dataset.label = header[i]; });
    });
  };
  const omitted = (configurations) =>
    table(section("What was left out"), ["configurations left out because", "count"],
          configurations.omitted.map((o) => [o.reason, number(o.count, 9)]));

  // Charts.
  const frame = (parent, kind, label) => {
    const box = element("div", undefined, parent);
    box.className = kind;
    const canvas = element("canvas", undefined, box);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", label);
    return canvas;
  };
  const legend = { position: "bottom", labels: { boxWidth: 10 } };
  // Lines of {label, colour, dashed, points: [{x, y, point}]}; `layout` and `lines` of a point make its tooltip.
  const lines = (parent, label, series, axes, describe, type, labels) =>
    new Chart(frame(parent, "chart", label), {
      type: type,
      data: { labels: labels, datasets: series.map((s) => ({
        label: s.label, data: s.points, showLine: true, spanGaps: true, borderWidth: 2, borderDash: s.dashed ? [5, 4] : [],
        pointRadius: 3, pointHoverRadius: 6, borderColor: s.colour, backgroundColor: s.colour })) },
      options: {
        maintainAspectRatio: false, interaction: { mode: "nearest", intersect: false }, scales: axes,
        plugins: { legend: legend, tooltip: { callbacks: {
          title: (items) => items[0].raw.point.layout,
          label: (item) => describe(item.raw.point) } } } } });
  const logarithmic = (text) => ({ type: "logarithmic", title: { display: true, text: text },
    ticks: { callback: (v) => /^[125]/.test(v.toExponential(0)) ? number(v) : null } });
  const linear = (text) => ({ title: { display: true, text: text } });

  const palette = ["#c0392b", "#5b6570", "#d98c00", "#e6b566", "#1f77b4", "#8fbbe0", "#2e8b57", "#8e5ea2", "#a0522d",
                   "#b8bec5", "#17a2b8", "#7fc99b", "#c9a0dc"];
  const hatched = (colour) => {
    const tile = document.createElement("canvas"), size = 8;
    tile.width = tile.height = size;
    const pen = tile.getContext("2d");
    pen.fillStyle = colour;
    pen.fillRect(0, 0, size, size);
    pen.strokeStyle = "rgba(255, 255, 255, 0.75)";
    pen.lineWidth = 2;
    pen.beginPath();
    for (const at of [-size, 0, size]) { pen.moveTo(at, size); pen.lineTo(at + size, 0); }
    pen.stroke();
    return pen.createPattern(tile, "repeat");
  };
  const wrapped = (text) => {
    const rows = [""];
    text.split(" ").forEach((word) => {
      if ((rows[rows.length - 1] + " " + word).length > 16) rows.push("");
      rows[rows.length - 1] = (rows[rows.length - 1] + " " + word).trim(); });
    return rows;
  };
  // Where a step of each chosen layout goes; parts that are priced and not executed are hatched.
  const breakdown = (parent, chosen) => {
    const named = chosen[0].time.filter((t) => t.part !== "hidden by overlap").map((t) => t.part);
    const of = (p, name) => p.time.find((t) => t.part === name);
    const names = named.filter((name) => chosen.some((p) => of(p, name).seconds > 0));
    const longest = Math.max(...chosen.map((p) => p.step_s)), unit = longest >= 1 ? "s" : "ms";
    new Chart(frame(parent, "bars", "time of a step by part"), {
      type: "bar",
      data: { labels: chosen.map((p) => p.question), datasets: names.map((name, i) => {
        const priced = of(chosen[0], name).priced_not_executed, colour = palette[i % palette.length];
        return { label: name, backgroundColor: priced ? hatched(colour) : colour,
                 data: chosen.map((p) => of(p, name).seconds * (unit === "s" ? 1 : 1e3)) }; }) },
      options: {
        indexAxis: "y", maintainAspectRatio: false,
        scales: { x: { stacked: true, title: { display: true, text: unit + " a step, before overlap" } },
                  y: { stacked: true, ticks: { callback: function (v) { return wrapped(this.getLabelForValue(v)); } } } },
        plugins: { legend: legend, tooltip: { callbacks: {
          title: (items) => chosen[items[0].dataIndex].layout,
          label: (item) => item.dataset.label + ": " + time(of(chosen[item.dataIndex], item.dataset.label).seconds) } } } } });
  };
  const operations = (chosen) =>
    table(section("Longest operations", "Of " + chosen.layout + "."), ["operation", "times", "a step", "bound by"],
          chosen.operations.slice(0, 12).map((o) => [o.name, number(o.times, 6), time(o.seconds), o.bound]));

  // A chosen layout: the question, its layout, sentences, and who comes next.
  const card = (parent, p, sentences, next) => {
    const box = element("div", undefined, parent);
    box.className = "card";
    element("h3", p.question, box);
    element("code", p.layout, element("p", undefined, box));
    sentences.forEach((text, i) => (i === 0 ? element("p", text, box) : soft(text, box)));
    if (!p.next) return;
    const line = soft("Next: ", box);
    element("code", p.next.layout, line);
    line.appendChild(document.createTextNode(next + "; loses on " + p.next.loses_on + "."));
  };

  const draw = (plan) => {
    Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
    Chart.defaults.animation = false;
    views[plan.command](plan);
    const all = () => Object.values(Chart.instances);
    window.addEventListener("beforeprint", () => all().forEach((chart) => chart.resize(720, 420)));
    window.addEventListener("afterprint", () => all().forEach((chart) => chart.resize()));
    if (document.body.dataset.report === "loading") document.body.dataset.report = "ready";
  };
  return { views, number, time, tokens, bytes, interval, efficiencies, counts, element, title, section, table, omitted,
           lines, logarithmic, linear, palette, breakdown, operations, card, draw };
})();
