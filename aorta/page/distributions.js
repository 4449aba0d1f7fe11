// Distributions, drawn by the plotting library.
(() => {
  const holder = document.getElementById("distribution-chart"), choice = document.getElementById("distribution-metric");
  const said = document.getElementById("distribution-said");
  const data = aorta.data("distribution-data");
  let plotly = null;

  const sides = () => {
    const rest = ["compute", "hidden", "exposed", "wait"].map(aorta.colour);
    const labels = [...new Set(data.runs.map((run) => run.side))];
    const byLabel = {};
    for (const label of labels) {
      if (label === data.candidate || labels.length === 1) byLabel[label] = aorta.colour("accent");
      else if (label === data.reference) byLabel[label] = aorta.colour("muted");
      else byLabel[label] = rest[Object.keys(byLabel).length % rest.length];
    }
    return byLabel;
  };
  const faint = (colour) => `${colour}2e`; // #rrggbb and an alpha of 18 %

  const short = (text, most) => aorta.plain([...text].length > most ? `${[...text].slice(0, most - 1).join("")}\u2026` : text);

  function traces(metric) {
    const colours = sides(), dashes = ["solid", "dash", "dot", "dashdot"], made = [];
    data.runs.forEach((run, i) => {
      const found = run.values[metric.name];
      if (!found) return;
      const [middle, least, most] = found, colour = colours[run.side], name = short(run.label, 40), legendgroup = String(i);
      if (least) {
        const shared = { x: run.steps.slice(run.num_warmup), mode: "lines", connectgaps: true, line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup };
        made.push({ ...shared, y: least.slice(run.num_warmup) }, { ...shared, y: most.slice(run.num_warmup), fill: "tonexty", fillcolor: faint(colour) });
      }
      const hover = (from, to) => ({
        name, legendgroup, x: run.steps.slice(from, to), y: middle.slice(from, to),
        customdata: run.steps.slice(from, to).map((_, k) => `${aorta.number(middle[from + k])} ${metric.unit}${least ? `, ranks ${aorta.number(least[from + k])} to ${aorta.number(most[from + k])}` : ""}`.replace("<", "under ")),
        hovertemplate: "%{fullData.name}, step %{x}: %{customdata}<extra></extra>",
      });
      const warm = run.num_warmup;
      made.push({ ...hover(0, warm), mode: "markers", showlegend: false, marker: { size: 6, symbol: "x-thin", line: { width: 1.4, color: colour } } });
      made.push({
        ...hover(warm, run.steps.length), mode: run.steps.length > 60 ? "lines" : "lines+markers", connectgaps: true, // steps that were not timed lie between
        line: { color: colour, width: 1.6, dash: dashes[i % dashes.length] }, marker: { size: 4, color: colour },
      });
      const judged = middle.slice(run.num_warmup).filter((value) => value !== null).sort((a, b) => a - b);
      if (judged.length) made.push({
        x: [i], y: [judged], q1: [quantile(judged, 0.25)], median: [quantile(judged, 0.5)], q3: [quantile(judged, 0.75)],
        lowerfence: [judged[0]], upperfence: [judged[judged.length - 1]], type: "box", name, legendgroup,
        showlegend: false, xaxis: "x2", boxpoints: "all", jitter: 0.5, pointpos: 0, fillcolor: faint(colour), line: { color: colour, width: 1.4 },
        marker: { color: colour, size: 3.5, opacity: 0.55 }, hoverinfo: "y",
      });
    });
    return made;
  }

  function layout(metric) {
    const ink = aorta.colour("ink"), muted = aorta.colour("muted"), line = aorta.colour("line");
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: aorta.colour("outline"), tickcolor: line, tickfont: { color: muted, size: 11.5 }, automargin: true };
    const warm = Math.max(...data.runs.map((run) => (run.num_warmup && run.steps.length > run.num_warmup ? (run.steps[run.num_warmup - 1] + run.steps[run.num_warmup]) / 2 : -Infinity)));
    const start = Math.min(...data.runs.map((run) => run.steps[0]));
    const end = Math.max(...data.runs.map((run) => run.steps[run.steps.length - 1]));
    return {
      height: 380, margin: { l: 56, r: 8, t: 30, b: 44 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
      xaxis: { ...axis, domain: [0, 0.7], range: [start - 0.5, end + 0.5], tickformat: "d", dtick: end - start < 8 ? 1 : undefined, title: { text: "global step", font: { color: muted, size: 12 } }, showgrid: false },
      xaxis2: {
        ...axis, domain: [0.75, 1], showgrid: false, range: [-0.6, data.runs.length - 0.4], tickangle: data.runs.length > 3 ? 45 : 0,
        tickvals: data.runs.map((_, i) => i), ticktext: data.runs.map((run) => short(run.label, data.runs.length > 2 ? 10 : 16)),
      },
      yaxis: { ...axis, title: { text: metric.unit || "ratio or count", font: { color: muted, size: 12 } }, range: range(metric) },
      legend: { orientation: "h", x: 0, y: 1.1, yanchor: "bottom" }, showlegend: data.runs.length > 1,
      hoverlabel: { bgcolor: aorta.colour("paper"), bordercolor: aorta.colour("outline"), font: { color: ink, size: 12 } },
      shapes: Number.isFinite(warm) ? [{ type: "rect", xref: "x", yref: "paper", x0: start - 0.5, x1: warm, y0: 0, y1: 1, fillcolor: aorta.colour("line"), opacity: 0.45, line: { width: 0 }, layer: "below" }] : [],
      annotations: Number.isFinite(warm) ? [{ xref: "x", yref: "paper", x: start - 0.5, y: 1, xanchor: "left", yanchor: "bottom", text: "warm-up", showarrow: false, font: { size: 11, color: muted } }] : [],
      dragmode: "zoom",
    };
  }
  // Warm-up steps may be far above the rest: the judged steps set the scale.
  function range(metric) {
    const judged = [], every = [];
    for (const run of data.runs) {
      const found = run.values[metric.name];
      if (!found) continue;
      for (const row of found) row.forEach((value, i) => { if (value !== null) { every.push(value); if (i >= run.num_warmup) judged.push(value); } });
    }
    if (!judged.length) return undefined;
    const low = Math.min(...judged), high = Math.max(...judged), room = (high - low || Math.abs(high) || 1) * 0.08;
    return [low - room, high + room];
  }

  function quantile(sorted, share) { // linear between neighbours, as the box and the tables have it
    const at = share * (sorted.length - 1), below = Math.floor(at);
    return sorted[below] + (at - below) * ((sorted[below + 1] ?? sorted[below]) - sorted[below]);
  }

  function summarise(metric) {
    const parts = data.runs.filter((run) => run.values[metric.name]).map((run) => {
      const judged = run.values[metric.name][0].slice(run.num_warmup).filter((value) => value !== null).sort((a, b) => a - b);
      if (!judged.length) return `${run.label}: not measured in the judged steps`;
      const q = (share) => quantile(judged, share);
      const every = run.every > 1 ? `, every ${run.every}th step` : "";
      return `${run.label}: quartiles ${[0.25, 0.5, 0.75].map((share) => aorta.number(q(share))).join(", ")} ${metric.unit}, least ${aorta.number(judged[0])}, greatest ${aorta.number(judged[judged.length - 1])}, ${judged.length} step${judged.length === 1 ? "" : "s"}${every}`;
    });
    const missing = data.runs.filter((run) => !run.values[metric.name]).map((run) => `${run.label}: not measured`);
    const warm = data.runs.some((run) => run.num_warmup) ? " Steps beyond the scale are those of the warm-up." : "";
    return `${[...parts, ...missing].join(". ")}.${warm}`;
  }

  async function draw() {
    const metric = data.metrics[Number(choice.value)];
    if (!metric) return;
    said.textContent = summarise(metric);
    holder.setAttribute("aria-label", `${metric.title} over steps. ${said.textContent}`);
    if (!plotly) return;
    await plotly.react(holder, traces(metric), layout(metric), { displayModeBar: false, responsive: true, displaylogo: false });
    holder.dataset.marks = holder.querySelectorAll(".trace path, .trace .point, .boxes path").length;
  }

  const groups = new Map();
  data.metrics.forEach((metric, i) => {
    if (!groups.has(metric.group)) {
      groups.set(metric.group, aorta.element("optgroup", undefined, { label: metric.group }));
      choice.append(groups.get(metric.group));
    }
    groups.get(metric.group).append(aorta.element("option", `${metric.title}${metric.unit ? `, ${metric.unit}` : ""}`, { value: i }));
  });
  if (!data.metrics.length) { said.textContent = "Not measured: no metric has a number."; return; }
  choice.addEventListener("change", draw);
  aorta.themed.push(draw);
  said.textContent = summarise(data.metrics[0]);

  aorta.whenNear(holder, async () => {
    try {
      plotly = await aorta.plotly();
      holder.replaceChildren();
    } catch (error) {
      said.textContent = `The chart cannot be drawn by this browser (${error.message}). ${said.textContent}`;
      return;
    }
    await draw();
  });
  addEventListener("beforeprint", () => { if (plotly) draw(); });
})();
