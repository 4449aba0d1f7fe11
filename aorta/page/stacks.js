// Sampled stacks as a flame graph: a box for each frame below its caller, as wide as its part of a mean step.
(() => {
  const holder = document.getElementById("stacks-chart");
  if (!holder) return;
  const runs = aorta.data("stack-data");
  const runChoice = document.getElementById("stacks-run"), viewChoice = document.getElementById("stacks-view");
  const said = document.getElementById("stacks-said");
  const ROW = 21, MOST_ROWS = 26, TOP = 4;
  let plotly = null, run = runs[0], views = [];

  const mean = (rows) => rows[0].map((_, i) => rows.reduce((sum, row) => sum + row[i], 0) / rows.length);
  const withBelow = (own) => { // a caller comes before what it calls
    const total = own.slice();
    for (let i = total.length - 1; i > 0; i--) total[run.parents[i]] += total[i];
    return total;
  };

  function makeViews() {
    const made = [{ title: "all ranks, a mean step", own: mean(run.us) }];
    if (run.ranks.length === 1) made[0].title = `rank ${run.ranks[0]}, a mean step`;
    else run.ranks.forEach((rank, i) => made.push({ title: `rank ${rank} against the others`, own: run.us[i], against: mean(run.us.filter((_, k) => k !== i)), rank }));
    if (run.often) made.push({ title: `slow steps (${run.often}) against usual ones`, own: run.sides[0], against: run.sides[1] });
    return made;
  }

  function mixed(from, to, share) { // of two colours #rrggbb
    const part = (text, i) => parseInt(text.slice(1 + 2 * i, 3 + 2 * i), 16);
    return `#${[0, 1, 2].map((i) => Math.round(part(from, i) + (part(to, i) - part(from, i)) * share).toString(16).padStart(2, "0")).join("")}`;
  }

  const ms = (us) => `${aorta.number(us / 1e3)} ms`;

  function trace(view) {
    const total = withBelow(view.own), against = view.against ? withBelow(view.against) : null;
    const shown = run.nodes.map((_, i) => i).filter((i) => total[i] > 0);
    const largest = against ? Math.max(...shown.map((i) => Math.abs(total[i] - against[i])), 1) : 1;
    const panel = aorta.colour("idle"), colours = { program: aorta.colour("compute"), library: aorta.colour("hidden"), asleep: aorta.colour("wait") };
    const more = (i) => (total[i] - against[i]) / largest;
    const colour = (i) => {
      if (against) return mixed(panel, aorta.colour(more(i) > 0 ? "worse" : "better"), Math.min(1, Math.abs(more(i))));
      if (run.nodes[i] < 0) return panel;
      return run.asleep[i] ? colours.asleep : run.frames[run.nodes[i]][2] ? colours.program : colours.library;
    };
    const text = (i) => (run.nodes[i] < 0 ? view.title : run.frames[run.nodes[i]][0]);
    const told = (i) => {
      const file = run.nodes[i] < 0 || !run.frames[run.nodes[i]][2] ? "" : `<br>${aorta.plain(run.files[run.frames[run.nodes[i]][1]])}`;
      const other = against ? `<br>there ${ms(against[i])}, ${total[i] > against[i] ? "+" : ""}${ms(total[i] - against[i])}` : "";
      const asleep = !against && run.asleep[i] ? "<br>the thread mostly sleeps" : "";
      return `<b>${aorta.plain(text(i))}</b>${file}<br>${ms(total[i])} of a step, ${(100 * total[i] / total[0]).toFixed(1)} %; ${ms(view.own[i])} in itself${other}${asleep}`;
    };
    const depth = [];
    run.parents.forEach((parent, i) => depth.push(parent < 0 ? 1 : depth[parent] + 1));
    return {
      rows: Math.min(MOST_ROWS, Math.max(TOP, ...shown.map((i) => depth[i]))),
      data: {
        type: "icicle", branchvalues: "remainder", tiling: { orientation: "v", pad: 1 }, sort: false, maxdepth: MOST_ROWS,
        ids: shown.map(String), parents: shown.map((i) => (run.parents[i] < 0 ? "" : String(run.parents[i]))),
        labels: shown.map((i) => aorta.plain(text(i))), values: shown.map((i) => view.own[i]),
        marker: { colors: shown.map(colour), line: { width: 0.5, color: aorta.colour("paper") } },
        textposition: "middle left", leaf: { opacity: 1 },
        textfont: { size: 11.5, color: shown.map((i) => aorta.colour((against ? Math.abs(more(i)) < 0.6 : run.nodes[i] < 0) ? "ink" : "paper")) },
        customdata: shown.map(told), hovertemplate: "%{customdata}<extra></extra>", pathbar: { visible: true, thickness: ROW },
      },
    };
  }

  async function draw() {
    const view = views[Number(viewChoice.value)];
    const meaning = view.against
      ? "Widths are the time here; orange boxes take longer here than there, green ones shorter."
      : "Blue: the program's own lines; green: libraries; orange: the thread mostly sleeps.";
    said.textContent = `${view.title[0].toUpperCase()}${view.title.slice(1)}: ${ms(withBelow(view.own)[0])}. ${meaning} ${run.num_samples.reduce((a, b) => a + b, 0)} samples of ${run.ranks.length} rank${run.ranks.length === 1 ? "" : "s"}.`;
    holder.setAttribute("aria-label", said.textContent);
    if (!plotly) return;
    const { rows, data } = trace(view);
    const layout = {
      height: (rows + 2) * ROW, margin: { l: 0, r: 0, t: 2, b: 2 }, paper_bgcolor: "transparent", uniformtext: { minsize: 11, mode: "hide" },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: aorta.colour("ink") },
      hoverlabel: { bgcolor: aorta.colour("paper"), bordercolor: aorta.colour("outline"), font: { color: aorta.colour("ink"), size: 12 }, align: "left" },
    };
    await plotly.react(holder, [data], layout, { displayModeBar: false, responsive: true });
    holder.dataset.marks = holder.querySelectorAll(".slice").length;
  }

  function pick() {
    run = runs[Number(runChoice.value)];
    views = makeViews();
    viewChoice.replaceChildren(...views.map((view, i) => aorta.element("option", view.title, { value: i })));
    const late = run.late === null ? -1 : views.findIndex((view) => view.rank === run.late);
    viewChoice.value = Math.max(0, late);
    draw();
  }

  runs.forEach((one, i) => runChoice.append(aorta.element("option", one.label, { value: i })));
  runChoice.parentElement.hidden = runs.length === 1;
  runChoice.addEventListener("change", pick);
  viewChoice.addEventListener("change", draw);
  aorta.themed.push(draw);
  pick();
  aorta.whenNear(holder, async () => {
    try {
      plotly = await aorta.plotly();
    } catch (error) {
      said.textContent = `The chart cannot be drawn by this browser (${error.message}). ${said.textContent}`;
      return;
    }
    await draw();
  });
  addEventListener("beforeprint", () => { if (plotly) draw(); });
})();
