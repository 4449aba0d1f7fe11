// The steps of a rank, a stacked column for each: a click on a bar shows the rank, one on a column the step.
(() => {
  const canvas = document.getElementById("steps-canvas");
  if (!canvas) return;
  const runs = aorta.data("account-data");
  const runChoice = document.getElementById("steps-run"), rankChoice = document.getElementById("steps-rank");
  const said = document.getElementById("steps-said"), context = canvas.getContext("2d");
  const GUTTER = 64, HEIGHT = 190, FOOT = 20;
  const WIDEST = 60;
  let run, rank, shown = [], top = 0, width = 0, each = 1, chosen = null;
  const COLOURS = { transfer: "exposed", copy: "outline", unknown: "panel" };

  for (const one of runs) {
    const bytes = Uint8Array.from(atob(one.levels), (character) => character.charCodeAt(0));
    one.levels = new Uint16Array(bytes.buffer);
  }
  const ms = (cell, column) => run.levels[(cell * run.ranks.length + rank) * run.from.length + column] * run.ms_per_level;

  function choose(label, number) {
    run = runs.find((one) => one.label === label) || runs[0];
    runChoice.value = runs.indexOf(run);
    rankChoice.replaceChildren(...run.ranks.map((one, i) => aorta.element("option", String(one), { value: i })));
    rank = Math.max(0, run.ranks.indexOf(number));
    pick();
  }
  function pick() {
    rankChoice.value = rank;
    shown = run.from.map((_, column) => run.cells.map((_, cell) => ms(cell, column)));
    const sums = shown.map((cells) => cells.reduce((sum, one) => sum + one, 0)).sort((a, b) => a - b);
    top = 1.15 * sums[Math.floor(0.98 * (sums.length - 1))]; // a rare long step is cut off
    chosen = null;
    said.textContent = `Rank ${run.ranks[rank]}: a column for each step. ${run.note} A click, or the arrow keys and Enter, shows a step in the timeline.`;
    for (const row of document.querySelectorAll("#time tr[data-rank]")) {
      const is_it = row.dataset.run === run.label && Number(row.dataset.rank) === run.ranks[rank];
      row.querySelector("button").setAttribute("aria-pressed", is_it);
    }
    draw();
  }

  function draw() {
    const ratio = devicePixelRatio || 1, num = shown.length;
    width = canvas.clientWidth;
    if (width < GUTTER + 20) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(HEIGHT * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = aorta.colour("paper");
    context.fillRect(0, 0, width, HEIGHT);
    context.font = aorta.font;
    context.textBaseline = "middle";
    each = Math.min(WIDEST, (width - GUTTER - 6) / num);
    const tall = (HEIGHT - FOOT - 8) / top, ground = HEIGHT - FOOT;
    const fills = run.cells.map(([, mark]) => aorta.paint(context, COLOURS[mark] || mark));
    const outline = aorta.colour("outline"), ink = aorta.colour("ink"), muted = aorta.colour("muted");
    shown.forEach((cells, column) => {
      const from = GUTTER + column * each, wide = Math.max(each - (each > 4 ? 1 : 0), 0.7);
      let y = ground;
      cells.forEach((value, cell) => {
        if (value <= 0) return;
        const part = value * tall;
        context.fillStyle = fills[cell];
        context.fillRect(from, y - part, wide, part);
        if (["idle", "unknown"].includes(run.cells[cell][1]) && each > 3) {
          context.strokeStyle = outline;
          context.lineWidth = 0.6;
          context.strokeRect(from + 0.3, y - part + 0.3, wide - 0.6, Math.max(part - 0.6, 0));
        }
        y -= part;
      });
      if (column === chosen) {
        context.strokeStyle = ink;
        context.lineWidth = 2;
        context.strokeRect(from - 1, Math.max(y, 1), wide + 2, ground - Math.max(y, 1));
      }
    });
    context.fillStyle = muted;
    context.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      const value = share * top / 1.15;
      context.fillText(`${aorta.number(value)} ms`, GUTTER - 6, Math.min(ground - value * tall, ground - 6));
    }
    context.textAlign = "center";
    const apart = Math.max(1, Math.ceil(60 / each));
    for (let column = 0; column < num; column += apart) {
      const at = GUTTER + (column + 0.5) * each;
      if (at < width - 12) context.fillText(String(run.from[column]), at, HEIGHT - FOOT / 2);
    }
    canvas.dataset.marks = num;
  }

  const at = (event) => {
    const column = Math.floor((event.clientX - canvas.getBoundingClientRect().left - GUTTER) / each);
    return column >= 0 && column < shown.length ? column : null;
  };
  const steps = (column) => (run.from[column] === run.to[column] ? `step ${run.from[column]}` : `steps ${run.from[column]} to ${run.to[column]}`);
  const parts = (column) => shown[column].map((value, cell) => [run.cells[cell][0], value]).filter(([, value]) => value > 0);
  const total = (column) => `rank ${run.ranks[rank]}, ${steps(column)}: ${aorta.number(shown[column].reduce((sum, one) => sum + one, 0))} ms`;

  function open(column) {
    chosen = column;
    const found = aorta.showStep ? aorta.showStep(run.label, run.from[column], run.to[column], run.ranks[rank]) : null;
    const words = parts(column).map(([title, value]) => `${title} ${aorta.number(value)}`).join(", ");
    const where = found === null ? "No step has its details here." : `The timeline below shows step ${found}${found >= run.from[column] && found <= run.to[column] ? "" : ", the nearest one with details"}.`;
    said.textContent = `${total(column)}: ${words}. ${where}`;
    draw();
  }
  canvas.addEventListener("pointermove", (event) => {
    const column = at(event);
    if (column === null) { aorta.tip(null); return; }
    aorta.tip(total(column), parts(column).map(([title, value]) => [title, `${aorta.number(value)} ms`]), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => aorta.tip(null));
  canvas.addEventListener("click", (event) => { const column = at(event); if (column !== null) open(column); });
  canvas.addEventListener("keydown", (event) => {
    const shift = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (shift) {
      chosen = Math.min(Math.max((chosen === null ? -1 : chosen) + shift, 0), shown.length - 1);
      said.textContent = `${total(chosen)}: ${parts(chosen).map(([title, value]) => `${title} ${aorta.number(value)}`).join(", ")}.`;
      draw();
    } else if (event.key === "Enter" && chosen !== null) open(chosen);
    else return;
    event.preventDefault();
  });

  document.getElementById("time").addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-rank]");
    if (!row) return;
    choose(row.dataset.run, Number(row.dataset.rank));
    document.getElementById("steps").scrollIntoView({ block: "nearest" });
  });
  aorta.showSteps = (label, number) => { if (runs.some((one) => one.label === label && one.ranks.includes(number))) choose(label, number); };
  runs.forEach((one, i) => runChoice.append(aorta.element("option", one.label, { value: i })));
  if (runs.length < 2) runChoice.parentElement.hidden = true;
  runChoice.addEventListener("change", () => choose(runs[Number(runChoice.value)].label, runs[Number(runChoice.value)].first_rank));
  rankChoice.addEventListener("change", () => { rank = Number(rankChoice.value); pick(); });
  aorta.themed.push(() => { if (run) draw(); });
  new ResizeObserver(() => { if (run && canvas.clientWidth !== width) draw(); }).observe(canvas);
  choose(runs[0].label, runs[0].first_rank);
})();
