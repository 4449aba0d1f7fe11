// The timeline of a step: a canvas, because thousands of spans move while it is dragged.
(() => {
  const canvas = document.getElementById("timeline-canvas");
  if (!canvas) return;
  const { runs, words } = aorta.data("timeline-data");
  for (const run of runs) for (const step of Object.values(run.steps)) for (const rank of step.ranks) {
    for (const spans of [rank.states, ...rank.rows.flatMap((row) => row.lanes)]) {
      let end = 0; // a span comes as its distance from the one before and its length, in 0.1 us
      for (const span of spans) {
        const start = end + span[0];
        end = start + span[1];
        [span[0], span[1]] = [start / 1e4, end / 1e4];
      }
    }
  }
  const context = canvas.getContext("2d");
  const said = document.getElementById("timeline-said"), note = document.getElementById("timeline-note");
  const stepChoice = document.getElementById("timeline-step"), rankChoice = document.getElementById("timeline-ranks");
  const STATES = ["compute", "hidden", "exposed", "idle", "wait"];
  const STATE_TITLES = ["compute only", "communication hidden under compute", "exposed communication", "idle", "exposed, waiting for a rank"];
  const AXIS = 26, THICK = 20, THIN = 13, GAP = 4, BETWEEN = 12, HEAD = 22;
  const MAX_ROWS_AT_FIRST = 44;
  let GUTTER = 150; // of labels; less on a phone

  const APART = 4; // runs whose steps differ by more than this each get the whole width
  let scale = 1, shared = true; // times are drawn scaled: ms, or % of the run's step
  let rows = [], view = [0, 1], whole = [0, 1], hovered = null, height = 0, width = 0, why = "median";
  let find = "", range = null; // text that spans are searched for; a selected stretch of the axis
  const wanted = runs.map(() => new Set()); // ranks shown, per run

  // ---- what is shown

  const stepOf = (run) => run.steps[run.chosen[why]];
  // Parts of [start, end] in which the rank communicates and computes nothing.
  function exposedParts(states, start, end) {
    const parts = [];
    for (let i = firstAfter(states, start); i < states.length && states[i][0] < end; i++) {
      if (states[i][2] === 2 || states[i][2] === 4) parts.push([Math.max(start, states[i][0]), Math.min(end, states[i][1])]);
    }
    return parts;
  }
  function firstAfter(spans, time) { // index of the first span that ends after time
    let lo = 0, hi = spans.length;
    while (lo < hi) { const mid = (lo + hi) >> 1; if (spans[mid][1] > time) hi = mid; else lo = mid + 1; }
    return lo;
  }

  function layOut() {
    rows = [];
    let y = AXIS;
    const notes = [], ends = runs.map((run) => Math.max(0, ...(stepOf(run) ? stepOf(run).ranks.map((rank) => rank.window[1]) : [])));
    const known = ends.filter(Boolean);
    shared = Math.max(...known) <= APART * Math.min(...known);
    if (!shared) notes.push("The steps are of very different length: each run has the whole width, and the axis is in % of its step.");
    runs.forEach((run, r) => {
      const step = stepOf(run);
      if (!step) return;
      run.scale = shared ? 1 : 100 / ends[r];
      if (runs.length > 1) { rows.push({ kind: "head", y, height: HEAD, label: `${run.label}, step ${run.chosen[why]}, ${aorta.number(ends[r])} ms` }); y += HEAD; }
      if (step.apart) notes.push(`${run.label}: the ranks' clocks are too far apart to set this step on one: each rank is drawn from its own start.`);
      for (const rank of step.ranks) {
        if (rank.clock_error_us !== null && !run.moved) run.error = Math.max(run.error || 0, rank.clock_error_us);
        if (rank.cut !== null) notes.push(`${run.label}, rank ${rank.rank}: shown until ${aorta.number(rank.cut)} ms; the Perfetto file has the rest.`);
        if (!wanted[r].has(rank.rank)) continue;
        rows.push({ kind: "states", y, height: THICK, label: `rank ${rank.rank}`, rank, spans: rank.states, bold: true, run });
        y += THICK + GAP;
        for (const row of rank.rows) {
          row.lanes.forEach((lane, i) => {
            rows.push({ kind: row.kind, y, height: THIN, label: i ? "" : row.name, rank, spans: lane, run });
            y += THIN + (i === row.lanes.length - 1 ? GAP : 1);
          });
        }
        y += BETWEEN;
      }
    });
    height = y;
    whole = [0, shared ? Math.max(...known) : 100];
    for (const run of runs) {
      if (run.residual_us !== null) notes.push(`${run.label}: the ranks' clocks are brought together on the ends of collectives and agree to ${aorta.number(run.residual_us)} \u00b5s.`);
      else if (run.moved) notes.push(`${run.label}: the ranks' clocks are brought together on the ends of collectives.`);
    }
    const error = Math.max(...runs.map((run) => run.error || 0));
    if (error) notes.push(`The starts of the steps are known to \u00b1${aorta.number(error)} \u00b5s on the ranks' shared clock.`);
    note.textContent = [...new Set(notes)].join(" ");
    canvas.height = 0; // sized by draw()
    canvas.style.height = `${height}px`;
    const shown = rows.filter((row) => row.kind === "states").length;
    canvas.setAttribute("aria-label", `Timeline of ${stepChoice.selectedOptions[0].textContent}, ${shown} rank rows. Its longest exposed collectives are in the tables below.`);
  }

  // ---- drawing

  const x = (time) => GUTTER + (time * scale - view[0]) / (view[1] - view[0]) * (width - GUTTER);
  const onAxis = (px) => view[0] + (px - GUTTER) / (width - GUTTER) * (view[1] - view[0]);

  function draw() {
    const ratio = devicePixelRatio || 1;
    width = canvas.clientWidth;
    GUTTER = width < 600 ? 84 : 150;
    if (width < GUTTER + 20) return; // hidden
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const colours = Object.fromEntries(["paper", "panel", "line", "outline", "ink", "muted", "accent", "compute", "hidden", "exposed", "wait", "idle"].map((name) => [name, aorta.colour(name)]));
    colours.pattern = new Map(["exposed", "wait"].map((name) => [colours[name], aorta.paint(context, name)]));
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, width, height);
    context.font = aorta.font;
    context.textBaseline = "middle";
    scale = 1;
    drawAxis(colours);
    let marks = 0;
    context.save();
    context.beginPath(); context.rect(GUTTER, AXIS, width - GUTTER, height); context.clip();
    for (const row of rows) if (row.spans) { scale = row.run.scale; marks += drawRow(row, colours); }
    if (hovered) drawHovered(colours);
    if (range) {
      scale = 1;
      context.globalAlpha = 0.16;
      context.fillStyle = colours.accent;
      context.fillRect(x(range[0]), AXIS, x(range[1]) - x(range[0]), height);
      context.globalAlpha = 1;
    }
    context.restore();
    drawLabels(colours);
    canvas.dataset.marks = marks;
    clearTimeout(later);
    later = setTimeout(sum, 120);
  }

  // ---- sums and search

  let later = 0;
  const isNamed = (row) => row.kind !== "states" && row.kind !== "copy" && row.kind !== "head";
  const has = (row, span) => isNamed(row) && span.length > 2 && words[span[2]].toLowerCase().includes(find);
  const sums = document.getElementById("timeline-sums"), MAX_NAMES = 8;

  // What each rank does, and the calls that take most, in the selected range, else in what is seen.
  function sum() {
    if (range || find) sums.open = true;
    const [lo, hi] = range || [Math.max(view[0], whole[0]), Math.min(view[1], whole[1])];
    const ranks = [], names = new Map();
    for (const row of rows) {
      if (!row.spans) continue;
      const from = lo / row.run.scale, until = hi / row.run.scale;
      const inside = (span) => Math.min(span[1], until) - Math.max(span[0], from);
      if (row.kind === "states") ranks.push([row, STATES.map(() => 0)]);
      for (let i = firstAfter(row.spans, from); i < row.spans.length && row.spans[i][0] < until; i++) {
        const span = row.spans[i];
        if (row.kind === "states") ranks[ranks.length - 1][1][span[2]] += inside(span);
        else if (isNamed(row) && span.length > 2 && (!find || has(row, span))) {
          const name = words[span[2]], known = names.get(name) || [0, 0];
          names.set(name, [known[0] + 1, known[1] + inside(span)]);
        }
      }
    }
    const longest = [...names].sort((a, b) => b[1][1] - a[1][1]);
    const [count, ms] = longest.reduce(([n, t], [, [m, u]]) => [n + m, t + u], [0, 0]);
    const unit = shared ? "ms" : "%", order = [0, 1, 2, 4, 3];
    const title = `Sums of what is ${range ? "selected" : "seen"}: ${aorta.number(lo)} to ${aorta.number(hi)} ${unit}${find ? `; ${count} spans with \u201c${find}\u201d, ${aorta.number(ms)} ms` : ""}`;
    const tables = [
      [["rank, ms", "compute", "hidden", "exposed", "waiting", "idle"], ranks.map(([row, times]) => [`${runs.length > 1 ? `${row.run.label} ` : ""}${row.rank.rank}`, ...order.map((state) => aorta.number(times[state]))])],
      [[find ? "spans found" : "longest in sum, shown ranks", "count", "ms"], longest.slice(0, MAX_NAMES).map(([name, [n, t]]) => [name, n, aorta.number(t)])],
    ];
    sums.firstElementChild.textContent = title;
    sums.lastElementChild.replaceChildren(...tables.filter(([, lines]) => lines.length).map(([heads, lines]) => {
      const holder = aorta.element("div", undefined, { class: "scroll" }), made = aorta.element("table", undefined, { class: "narrow sums" });
      for (const [i, texts] of [heads, ...lines].entries()) {
        const line = (i ? made.tBodies[0] || made.createTBody() : made.createTHead()).insertRow();
        texts.forEach((text, column) => line.append(aorta.element(i && column ? "td" : "th", String(text), column ? { class: "num" } : { scope: i ? "row" : "col" })));
      }
      holder.append(made);
      return holder;
    }));
  }

  function toNext() { // the next span with the text, from the one that was found last
    const found = rows.flatMap((row) => (row.spans ? row.spans.filter((span) => has(row, span)).map((span) => ({ row, span })) : []));
    if (!find || !found.length) { said.textContent = find ? `No span that is drawn has \u201c${find}\u201d.` : ""; return; }
    const last = hovered ? found.findIndex((one) => one.span === hovered.span) : -1;
    visit(found[(last + 1) % found.length]);
  }
  const findBox = document.getElementById("timeline-find");
  findBox.addEventListener("input", () => { find = findBox.value.trim().toLowerCase(); draw(); });
  findBox.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); toNext(); } });

  // The thick rows have the patterns of the bars; thin ones, which hold names, have them on paper alone.
  const paint = (colour, colours, row) => (row.kind === "states" || aorta.printing ? colours.pattern.get(colour) || colour : colour);

  function drawAxis(colours) {
    const span = view[1] - view[0], about = span / Math.max(2, (width - GUTTER) / 90);
    const power = 10 ** Math.floor(Math.log10(about));
    const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= about);
    const digits = Math.max(0, -Math.floor(Math.log10(every) + 1e-9));
    context.textAlign = "center";
    for (let i = Math.ceil(view[0] / every); i * every <= view[1]; i++) {
      const at = x(i * every);
      context.fillStyle = colours.line;
      context.fillRect(Math.round(at), AXIS - 4, 1, height - AXIS);
      context.fillStyle = colours.muted;
      const text = (i * every).toFixed(digits);
      if (at < width - 30) context.fillText(text, Math.max(at, GUTTER + context.measureText(text).width / 2), AXIS / 2);
    }
    context.textAlign = "right";
    context.fillStyle = colours.paper;
    context.fillRect(width - 28, 0, 28, AXIS - 4);
    context.fillStyle = colours.muted;
    context.fillText(shared ? "ms" : "%", width - 6, AXIS / 2);
  }

  function drawRow(row, colours) {
    let marks = 0;
    const { spans, y, height: tall } = row, [lo, hi] = [view[0] / scale, view[1] / scale];
    const minimum = (hi - lo) / (width - GUTTER) / 3; // a third of a pixel
    const first = firstAfter(spans, lo), last = firstAfter(spans, hi);
    if (last - first > (width - GUTTER) / 2) return drawDense(row, colours, first, last);
    const fill = (start, end, colour) => {
      const from = x(start);
      context.fillStyle = paint(colour, colours, row);
      context.fillRect(from, y, Math.max(x(end) - from - (end - start > 3 * minimum * 3 ? 0.6 : 0), 0.6), tall);
    };
    for (let i = first; i < spans.length && spans[i][0] < hi; i++) {
      const span = spans[i], [start, end] = span;
      marks++;
      context.globalAlpha = find && isNamed(row) && !has(row, span) ? 0.2 : 1;
      if (row.kind === "states") {
        fill(start, end, colours[STATES[span[2]]]);
        if (span[2] === 3) { context.strokeStyle = colours.outline; context.lineWidth = 0.8; const a = x(start); if (x(end) - a > 3) context.strokeRect(a + 0.4, y + 0.4, x(end) - a - 1.2, tall - 0.8); }
      } else if (row.kind === "compute") fill(start, end, colours.compute);
      else if (row.kind === "host") {
        fill(start, end, colours.idle);
        context.strokeStyle = colours.outline;
        context.lineWidth = 0.8;
        context.strokeRect(x(start) + 0.4, y + 0.4, Math.max(x(end) - x(start) - 0.8, 0.4), tall - 0.8);
        name(row, span, x(start), x(end), colours.idle);
      }
      else if (row.kind === "copy") fill(start, end, colours.outline);
      else drawCollective(row, span, colours, fill);
    }
    context.globalAlpha = 1;
    return marks;
  }

  // More spans than pixels: a column shows by its height which share of its time each state took.
  function drawDense(row, colours, first, last) {
    const columns = Math.ceil(width - GUTTER), each = (view[1] - view[0]) / scale / (width - GUTTER), lo = view[0] / scale;
    const kinds = row.kind === "states" ? STATES : [{ compute: "compute", copy: "outline", comm: "exposed", host: "idle" }[row.kind], "hidden"];
    const time = kinds.map(() => new Float64Array(columns + 1));
    const add = (kind, start, end) => {
      const from = Math.max(0, (start - lo) / each), to = Math.min(columns, (end - lo) / each);
      for (let column = Math.floor(from); column < to; column++) {
        time[kind][column] += Math.min(to, column + 1) - Math.max(from, column);
      }
    };
    for (let i = first; i < last; i++) {
      const [start, end, state] = row.spans[i];
      if (row.kind === "states") add(state, start, end);
      else if (row.kind === "comm") {
        let exposed = 0;
        for (const [a, b] of exposedParts(row.rank.states, start, end)) { add(0, a, b); exposed += b - a; }
        if (end - start > exposed) add(1, start, start + (end - start - exposed));
      } else add(0, start, end);
    }
    for (let column = 0; column < columns; column++) {
      let bottom = row.y + row.height;
      for (const kind of row.kind === "states" ? [0, 1, 2, 4, 3] : [0, 1]) { // idle on top
        if (time[kind][column] <= 0) continue;
        const part = Math.max(Math.min(time[kind][column], 1) * row.height, row.kind === "states" ? 0 : 1.5);
        context.fillStyle = paint(colours[kinds[kind]], colours, row);
        context.fillRect(GUTTER + column, bottom - part, 1, part);
        bottom -= part;
      }
    }
    return last - first;
  }

  // Hidden, waiting and exposed parts in their colours; what lies outside the step is hollow, because
  // only the next step knows whether it was hidden. The name goes into the widest part, where it fits.
  function drawCollective(row, span, colours, fill) {
    const [from, until] = row.rank.window, start = Math.max(span[0], from), end = Math.min(span[1], until);
    const waits = span[9] ? span[0] + span[9] : span[0], pieces = [];
    let at = start;
    const add = (to, colour) => { if (to > at) { pieces.push([at, to, colour]); at = to; } };
    for (const [a, b] of exposedParts(row.rank.states, start, end)) {
      add(a, colours.hidden);
      add(Math.min(b, waits), colours.wait);
      add(b, colours.exposed);
    }
    add(end, colours.hidden);
    for (const [a, b, colour] of pieces) fill(a, b, colour);
    context.strokeStyle = colours.outline;
    context.lineWidth = 1;
    for (const [a, b] of [[span[0], Math.min(span[1], from)], [Math.max(span[0], until), span[1]]]) {
      if (b > a) context.strokeRect(x(a) + 0.5, row.y + 0.5, Math.max(x(b) - x(a) - 1, 0.5), row.height - 1);
    }
    const shown = pieces.map(([a, b, colour]) => [Math.max(x(a), GUTTER), Math.min(x(b), width), colour]);
    const widest = shown.reduce((best, piece) => (piece[1] - piece[0] > best[1] - best[0] ? piece : best), [0, 0, ""]);
    name(row, span, ...widest);
  }
  function name(row, span, from, until, colour) { // where it fits
    const left = Math.max(from, GUTTER), room = Math.min(until, width) - left - 8, text = words[span[2]];
    if (room < 22 || context.measureText(text).width > room) return;
    context.textAlign = "left";
    context.fillStyle = legible(colour);
    context.fillText(text, left + 4, row.y + row.height / 2 + 0.5);
  }
  function legible(colour) { // black or white, whichever has more contrast to #rrggbb
    const parts = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16) / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
  }

  function drawHovered(colours) {
    context.strokeStyle = colours.ink;
    const box = (row, span, thick) => {
      scale = row.run.scale;
      context.lineWidth = thick;
      context.strokeRect(x(span[0]) - 1, row.y - 1, Math.max(3, x(span[1]) - x(span[0]) + 1), row.height + 2);
    };
    box(hovered.row, hovered.span, 2);
    if (hovered.row.kind !== "comm" || hovered.span.length < 8) return;
    const same = (span) => [2, 3, 5, 7].every((i) => span[i] === hovered.span[i]); // op, group, bytes, seq
    for (const row of rows) {
      if (row.kind === "comm" && row.run === hovered.row.run && hovered.span[7] !== null) for (const span of row.spans) if (same(span)) box(row, span, 1.2);
    }
  }

  function drawLabels(colours) {
    context.textAlign = "left";
    for (const row of rows) {
      context.fillStyle = row.kind === "head" || row.bold ? colours.ink : colours.muted;
      context.font = row.kind === "head" || row.bold ? `600 ${aorta.font}` : aorta.font;
      const room = row.kind === "head" ? width : GUTTER - (row.bold ? 16 : 28);
      context.fillText(fitted(row.label, room), row.bold || row.kind === "head" ? 8 : 20, row.y + row.height / 2 + 0.5);
    }
    context.font = aorta.font;
  }
  function fitted(text, room) {
    if (context.measureText(text).width <= room) return text;
    let cut = text;
    while (cut && context.measureText(`${cut}\u2026`).width > room) cut = cut.slice(0, -1);
    return `${cut}\u2026`;
  }

  // ---- hover and words

  function lines({ row, span }) {
    const [start, end] = span;
    const ms = (value) => `${aorta.number(value)} ms`;
    const found = [];
    let title;
    if (row.kind === "states") title = STATE_TITLES[span[2]];
    else if (row.kind !== "comm") title = row.kind === "copy" ? "copy" : span.length > 2 ? words[span[2]] : "compute";
    else title = words[span[2]];
    found.push(["rank", String(row.rank.rank)], ["start", ms(start)], ["duration", ms(end - start)]);
    if (row.kind === "host" && words[span[3]]) found.push(["at", words[span[3]]]);
    if (row.kind === "comm") {
      const exposed = exposedParts(row.rank.states, start, end).reduce((sum, [a, b]) => sum + b - a, 0);
      found.push(["exposed", ms(exposed)]);
      if (span.length > 3) {
        found.push(
          ["waiting for the last rank", span[9] === null ? "not known" : ms(span[9])],
          ["bytes", span[5] === null ? "not known" : [aorta.bytes(span[5]), words[span[6]]].filter(Boolean).join(", ")],
          ["group", [words[span[3]], span[4] === null ? "" : `${span[4]} rank${span[4] === 1 ? "" : "s"}`].filter(Boolean).join(", ") || "not known"],
          ["sequence", `${span[7]}${span[10] ? ", async" : ""}`],
          ["phase", words[span[11]] || "not known"],
          ["busbw", span[8] === null ? "n/a" : `${aorta.number(span[8])} GB/s`],
        );
      }
    }
    return [title, found];
  }

  function show(found, px, py) {
    hovered = found;
    if (found) aorta.tip(...lines(found), px, py); else aorta.tip(null);
    draw();
  }

  function at(event) {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const row = rows.find((r) => r.spans && py >= r.y - 1 && py <= r.y + r.height + 1);
    if (!row || px < GUTTER) return null;
    const slack = (view[1] - view[0]) / (width - GUTTER) / row.run.scale * 2, when = onAxis(px) / row.run.scale;
    const i = firstAfter(row.spans, when - slack);
    const span = row.spans[i];
    if (!span || span[0] > when + slack) return null;
    const next = row.spans[i + 1]; // within slack of two, the one that is really there
    return { row, span: next && span[1] < when && next[0] <= when ? next : span, index: i };
  }

  // ---- moving

  function setView(lo, hi) {
    const least = (whole[1] - whole[0]) * 1e-5;
    const span = Math.min(Math.max(hi - lo, least), (whole[1] - whole[0]) * 1.02);
    const start = Math.min(Math.max(lo, whole[0] - span * 0.01), whole[1] + span * 0.01 - span);
    view = [start, start + span];
    draw();
  }
  const zoom = (factor, around = (view[0] + view[1]) / 2) =>
    setView(around - (around - view[0]) * factor, around + (view[1] - around) * factor);
  const move = (share) => setView(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));
  const all = () => { range = null; setView(whole[0], whole[1]); };

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { px: event.clientX, view: [...view], from: event.shiftKey ? onAxis(event.clientX - canvas.getBoundingClientRect().left) : null };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) { show(at(event), event.clientX, event.clientY); return; }
    drag.moved = drag.moved || Math.abs(event.clientX - drag.px) > 3;
    if (drag.from !== null) {
      const to = Math.min(Math.max(onAxis(event.clientX - canvas.getBoundingClientRect().left), whole[0]), whole[1]);
      range = [Math.min(drag.from, to), Math.max(drag.from, to)];
      draw();
      return;
    }
    const shift = (drag.px - event.clientX) / (width - GUTTER) * (drag.view[1] - drag.view[0]);
    aorta.tip(null);
    setView(drag.view[0] + shift, drag.view[1] + shift);
  });
  canvas.addEventListener("pointerup", (event) => {
    const found = drag && !drag.moved ? at(event) : null;
    if (drag && !drag.moved && drag.from !== null) { range = null; draw(); }
    if (found) tell(found);
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => { if (hovered) show(null); });
  canvas.addEventListener("dblclick", all);
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    zoom(1.0015 ** event.deltaY, onAxis(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });
  addEventListener("scroll", () => { if (hovered) show(null); }, { passive: true });

  let cursor = { row: 0, index: -1 };
  function walk(rowShift, spanShift) {
    const walkable = rows.filter((row) => row.spans && row.spans.length);
    if (!walkable.length) return;
    cursor.row = Math.min(Math.max(cursor.row + rowShift, 0), walkable.length - 1);
    const row = walkable[cursor.row];
    if (rowShift) cursor.index = firstAfter(row.spans, hovered ? hovered.span[0] : view[0] / row.run.scale);
    cursor.index = Math.min(Math.max(cursor.index + spanShift, 0), row.spans.length - 1);
    visit({ row, span: row.spans[cursor.index] });
  }
  function visit({ row, span }) { // it is seen, marked and told
    const [start, end] = [span[0] * row.run.scale, span[1] * row.run.scale];
    if (start < view[0] || end > view[1]) {
      const half = Math.max((view[1] - view[0]) / 2, (end - start) * 0.6), middle = (start + end) / 2;
      setView(middle - half, middle + half);
    }
    const box = canvas.getBoundingClientRect();
    scale = row.run.scale;
    show({ row, span }, box.left + x(span[0]), box.top + row.y + row.height);
    tell({ row, span });
  }
  function tell({ row, span }) {
    const [title, pairs] = lines({ row, span });
    said.textContent = `${row.label || "stream"}: ${title}; ${pairs.map(([name, value]) => `${name} ${value}`).join(", ")}.`;
  }
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15), "+": () => zoom(0.7), "=": () => zoom(0.7),
      "-": () => zoom(1 / 0.7), 0: all, Home: all, n: () => walk(0, 1), p: () => walk(0, -1),
      ArrowUp: () => walk(-1, 0), ArrowDown: () => walk(1, 0), Escape: () => show(null),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (action) { event.preventDefault(); action(); }
  });
  canvas.addEventListener("blur", () => { if (hovered) show(null); });
  document.getElementById("zoom-in").addEventListener("click", () => zoom(0.6));
  document.getElementById("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
  document.getElementById("zoom-all").addEventListener("click", all);

  // ---- choices

  const names = ["median", "slowest", "first", "last", "cause 1", "cause 2", "cause 3", "cause 4", "cause 5"]
    .filter((name) => runs.some((run) => run.chosen[name] !== undefined));
  const further = runs.flatMap((run) => Object.entries(run.chosen)).filter(([name]) => name.startsWith("step "));
  names.push(...new Map(further.sort((a, b) => a[1] - b[1])).keys());
  for (const name of names) {
    const steps = runs.filter((run) => run.chosen[name] !== undefined)
      .map((run) => (runs.length > 1 ? `${run.label} ${run.chosen[name]}` : run.chosen[name]));
    stepChoice.append(aorta.element("option", name.startsWith("step ") ? name : `${name.startsWith("cause") ? `step of ${name}` : `${name} step`} (${steps.join(", ")})`, { value: name }));
  }
  stepChoice.addEventListener("change", () => { why = stepChoice.value; hovered = null; aorta.tip(null); layOut(); all(); });

  const boxes = new Map();
  function chooseRanks() {
    const seen = runs.map((run) => (stepOf(run) ? stepOf(run).ranks : []));
    const num = seen.flat().reduce((sum, rank) => sum + 1 + rank.rows.reduce((n, row) => n + row.lanes.length, 0), 0);
    const few = num <= MAX_ROWS_AT_FIRST;
    runs.forEach((run, r) => seen[r].forEach((rank, i) => {
      const label = aorta.element("label");
      const box = aorta.element("input", undefined, { type: "checkbox" });
      box.checked = few || rank.rank === run.late || i === 0 || i === seen[r].length - 1;
      boxes.set(`${run.label}\n${rank.rank}`, box);
      if (box.checked) wanted[r].add(rank.rank);
      box.addEventListener("change", () => {
        if (box.checked) wanted[r].add(rank.rank); else wanted[r].delete(rank.rank);
        layOut(); draw();
      });
      label.append(box, runs.length > 1 ? `${run.label} ${rank.rank}` : String(rank.rank));
      rankChoice.append(label);
    }));
  }

  aorta.showRank = (label, rank) => { // whether the timeline has it
    const box = boxes.get(`${label}\n${rank}`);
    if (box && !box.checked) box.click();
    return Boolean(box);
  };

  // The step of [from, to] that is kept, else the nearest one; null where none is.
  aorta.showStep = (label, from, to, rank) => {
    const run = runs.find((one) => one.label === label);
    if (!run || !Object.keys(run.chosen).length) return null;
    const away = (step) => Math.max(from - step, step - to, 0);
    const [best, step] = Object.entries(run.chosen).reduce((a, b) => (away(b[1]) < away(a[1]) ? b : a));
    stepChoice.value = best;
    stepChoice.dispatchEvent(new Event("change"));
    aorta.showRank(label, rank);
    return step;
  };

  // A cause's link: its step, its rank, and the stretch that stands for it.
  for (const link of document.querySelectorAll("a[data-step-choice]")) {
    link.addEventListener("click", () => {
      const step = Number(link.dataset.step);
      if (!names.includes(link.dataset.stepChoice)) {
        const nearest = aorta.showStep(link.dataset.run, step, step, Number(link.dataset.rank));
        if (nearest !== null) said.textContent = `Step ${step} was kept without its details: this is step ${nearest}, the nearest one with details.`;
        return;
      }
      stepChoice.value = link.dataset.stepChoice;
      stepChoice.dispatchEvent(new Event("change"));
      const run = runs.find((one) => one.label === link.dataset.run), number = Number(link.dataset.rank);
      if (!run || link.dataset.rank === undefined) return;
      aorta.showRank(run.label, number);
      const rank = stepOf(run) && stepOf(run).ranks.find((one) => one.rank === number);
      if (!rank || link.dataset.from === undefined) return;
      const from = rank.window[0] + Number(link.dataset.from), to = rank.window[0] + Number(link.dataset.to);
      const margin = 0.5 * (to - from);
      view = [Math.max(whole[0], (from - margin) * run.scale), Math.min(whole[1], (to + margin) * run.scale)];
      draw();
    });
  }

  chooseRanks();
  layOut();
  all();
  aorta.themed.push(draw);
  new ResizeObserver(() => { if (canvas.clientWidth !== width) draw(); }).observe(canvas);
})();
