// Ranks by steps: a cell for each, the worst rank on top. A click shows the rank in the timeline, where it is there.
(() => {
  const canvas = document.getElementById("heat-canvas");
  if (!canvas) return;
  const runs = aorta.data("heat-data");
  const runChoice = document.getElementById("heat-run"), metricChoice = document.getElementById("heat-metric");
  const said = document.getElementById("heat-said");
  const context = canvas.getContext("2d");
  const GUTTER = 64, AXIS = 20;
  let run, metric, cells, tall, width, selected = null;

  const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const value = (level) => (level === 0 ? null : metric.low + (level - 1) / 254 * (metric.high - metric.low));
  const shown = (number) => (number === null ? "not measured" : `${aorta.number(number)} ${metric.unit}`);
  const mixed = (from, to, share) => {
    const parts = [1, 3, 5].map((i) => Math.round(parseInt(from.slice(i, i + 2), 16) * (1 - share) + parseInt(to.slice(i, i + 2), 16) * share));
    return `rgb(${parts.join(",")})`;
  };

  function choose() {
    run = runs[Number(runChoice.value)];
    const before = metric && metric.name;
    metricChoice.replaceChildren(...run.metrics.map((one, i) => aorta.element("option", one.unit ? `${one.title}, ${one.unit}` : one.title, { value: i })));
    const same = run.metrics.findIndex((one) => one.name === before);
    if (same > 0) metricChoice.value = same;
    pick();
  }
  function pick() {
    metric = run.metrics[Number(metricChoice.value)];
    cells = bytes(metric.cells);
    const num = run.ranks.length;
    tall = num <= 24 ? 16 : num <= 64 ? 9 : num <= 200 ? 4 : 2;
    canvas.style.height = `${AXIS + num * tall + 2}px`;
    const worst = metric.order[0], name = `Rank ${run.ranks[worst]}`;
    said.textContent = `${metric.title}: the worst is ${name.toLowerCase()}, ${shown(metric.means[worst])} in the mean of the judged steps; colours from ${shown(metric.low)} to ${shown(metric.high)}${metric.low_is_worse ? ", low is dark" : ""}.`;
    draw();
  }

  function draw() {
    const ratio = devicePixelRatio || 1, num = run.ranks.length, columns = run.first.length;
    width = canvas.clientWidth;
    if (width < GUTTER + 20) return;
    const height = AXIS + num * tall + 2;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const paper = aorta.colour("paper"), ink = aorta.colour("ink"), muted = aorta.colour("muted");
    context.fillStyle = paper;
    context.fillRect(0, 0, width, height);
    const ramp = Array.from({ length: 256 }, (_, level) => (level === 0 ? aorta.colour("panel")
      : mixed(aorta.colour("idle"), aorta.colour("exposed"), metric.low_is_worse ? 1 - (level - 1) / 254 : (level - 1) / 254)));
    const each = (width - GUTTER) / columns;
    metric.order.forEach((rank, row) => {
      const y = AXIS + row * tall;
      for (let column = 0; column < columns; column++) {
        context.fillStyle = ramp[cells[rank * columns + column]];
        const from = Math.floor(GUTTER + column * each);
        context.fillRect(from, y, Math.max(1, Math.floor(GUTTER + (column + 1) * each) - from), tall > 6 ? tall - 1 : tall);
      }
    });
    if (run.num_warmup) {
      context.fillStyle = paper;
      context.globalAlpha = 0.6;
      context.fillRect(GUTTER, AXIS, run.num_warmup * each, num * tall);
      context.globalAlpha = 1;
    }
    context.font = aorta.font;
    context.textBaseline = "middle";
    context.textAlign = "left";
    const every = Math.max(1, Math.ceil(14 / tall));
    metric.order.forEach((rank, row) => {
      if (row % every) return;
      context.fillStyle = rank === selected ? ink : muted;
      context.fillText(`${num > 999 ? "" : "rank "}${run.ranks[rank]}`, 8, AXIS + row * tall + Math.max(tall, 10) / 2);
    });
    context.fillStyle = muted;
    context.textAlign = "center";
    const apart = Math.max(1, Math.ceil(60 / each));
    for (let column = 0; column < columns; column += apart) context.fillText(String(run.first[column]), Math.max(GUTTER + (column + 0.5) * each, GUTTER + 10), AXIS / 2);
    if (selected !== null) {
      const row = metric.order.indexOf(selected);
      context.strokeStyle = ink;
      context.lineWidth = 1.5;
      context.strokeRect(GUTTER, AXIS + row * tall - 0.5, width - GUTTER - 1, tall);
    }
    canvas.dataset.marks = num * columns;
  }

  function at(event) {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const row = Math.floor((py - AXIS) / tall), column = Math.floor((px - GUTTER) / (width - GUTTER) * run.first.length);
    if (row < 0 || row >= run.ranks.length || column < 0 || column >= run.first.length) return null;
    return { rank: metric.order[row], column };
  }
  const words = ({ rank, column }) => {
    const steps = run.first[column] === run.last[column] ? `step ${run.first[column]}` : `steps ${run.first[column]} to ${run.last[column]}`;
    const level = cells[rank * run.first.length + column];
    const bound = level === 255 ? "at least " : level === 1 && metric.low > 0 ? "at most " : "";
    return [`rank ${run.ranks[rank]}, ${steps}`, `${metric.title}: ${bound}${shown(value(level))}`];
  };
  canvas.addEventListener("pointermove", (event) => {
    const found = at(event);
    if (!found) { aorta.tip(null); return; }
    const [title, line] = words(found);
    aorta.tip(title, [[line, ""]], event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => aorta.tip(null));
  canvas.addEventListener("click", (event) => {
    const found = at(event);
    if (found) select(found.rank, words(found).join(": "));
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const row = Math.max(0, Math.min(run.ranks.length - 1, (selected === null ? -1 : metric.order.indexOf(selected)) + step));
    const rank = metric.order[row];
    select(rank, `Rank ${run.ranks[rank]}: ${metric.title} ${shown(metric.means[rank])} in the mean of the judged steps`);
  });
  function select(rank, text) {
    selected = rank;
    if (aorta.showSteps) aorta.showSteps(run.label, run.ranks[rank]);
    const is_there = aorta.showRank ? aorta.showRank(run.label, run.ranks[rank]) : false;
    said.textContent = `${text}.${is_there ? " It is shown in the timeline below." : ""}`;
    draw();
  }

  runs.forEach((one, i) => runChoice.append(aorta.element("option", one.label, { value: i })));
  if (runs.length < 2) runChoice.parentElement.hidden = true;
  runChoice.addEventListener("change", () => { selected = null; choose(); });
  metricChoice.addEventListener("change", pick);
  aorta.themed.push(() => { if (metric) draw(); });
  new ResizeObserver(() => { if (metric) draw(); }).observe(canvas);
  choose();
})();
