"use strict";
// Theme, tables, and what the charts share. Text from the data reaches the page as text nodes only.
const aorta = {
  data: (id) => JSON.parse(document.getElementById(id).textContent),
  colour: (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(),
  themed: [], // called after the theme changed
  element(name, text, attributes = {}) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  },
  number(value) { // as the tables print numbers
    if (value === null || value === undefined) return "n/a";
    const size = Math.abs(value);
    const digits = size >= 999.95 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 || size === 0 ? 2 : 3;
    const text = size.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    if (size > 0 && !/[1-9]/.test(text)) return value > 0 ? "<0.001" : text;
    return (value < 0 ? "\u2212" : "") + text;
  },
  bytes(size) {
    for (const [name, power] of [["TiB", 40], ["GiB", 30], ["MiB", 20], ["KiB", 10]]) {
      if (size >= 2 ** power) return `${(size / 2 ** power).toFixed(1)} ${name}`;
    }
    return `${size} B`;
  },
  font: '11.5px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif',
  tip(title, pairs = [], px = 0, py = 0) { // a title and lines of a name and a value; null hides it
    const tip = document.getElementById("tip");
    tip.hidden = title === null;
    if (tip.hidden) return;
    tip.replaceChildren(aorta.element("b", title), ...pairs.map(([name, value]) => {
      const line = aorta.element("div");
      line.append(aorta.element("span", name), value);
      return line;
    }));
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(px + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${py + 18 + box.height > innerHeight ? Math.max(4, py - box.height - 12) : py + 18}px`;
  },
  paint(context, name) { // the fill of a mark; exposed and waiting time have a pattern, to be told apart in grey
    const colour = aorta.colour(name);
    if (!["exposed", "wait", "outline"].includes(name)) return colour;
    const tile = aorta.element("canvas", undefined, { width: 6, height: 6 }), pen = tile.getContext("2d");
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 6, 6);
    pen.fillStyle = pen.strokeStyle = aorta.colour("paper");
    if (name === "wait") { pen.beginPath(); pen.arc(3, 3, 1.1, 0, 7); pen.fill(); return context.createPattern(tile, "repeat"); }
    pen.lineWidth = 1;
    pen.beginPath();
    for (const start of [-6, 0, 6]) { pen.moveTo(start, 6); pen.lineTo(start + 6, 0); }
    if (name === "outline") for (const start of [-6, 0, 6]) { pen.moveTo(start, 0); pen.lineTo(start + 6, 6); }
    pen.stroke();
    return context.createPattern(tile, "repeat");
  },
};
document.documentElement.classList.add("scripted");

// A label is text: the plotting library would read <b>, <a href> and the like in names as markup.
aorta.plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
aorta.plotly = (() => { // the plotting library is packed in the page, and started when a chart first needs it
  let started = null;
  const start = async () => {
    const packed = atob(document.getElementById("plotly-packed").textContent);
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    const source = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    // A part for maps that is not used here would add a style of its own, which the page's policy refuses,
    // unless it finds the element it made before.
    for (const [, id] of source.matchAll(/getElementById\("([0-9a-f]{40,})"\)/g)) {
      if (!document.getElementById(id)) document.head.append(aorta.element("meta", undefined, { id }));
    }
    const script = document.createElement("script");
    script.textContent = source;
    document.head.append(script);
    return window.Plotly;
  };
  return () => (started ??= start());
})();
aorta.whenNear = (element, start) => { // calls start once, before the element is scrolled to
  const near = new IntersectionObserver((seen) => { if (seen.some((one) => one.isIntersecting)) { near.disconnect(); start(); } }, { rootMargin: "600px" });
  near.observe(element);
};

(() => { // ---- theme
  const root = document.documentElement, button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("aorta-theme"); } catch { return null; } };
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${dark() ? "light" : "dark"} theme`);
    for (const redraw of aorta.themed) redraw();
  };
  if (["light", "dark"].includes(stored())) root.dataset.theme = stored();
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("aorta-theme", root.dataset.theme); } catch { /* not kept then */ }
    show();
  });
  system.addEventListener("change", show);
  let before = null;
  addEventListener("beforeprint", () => {
    before = { theme: root.dataset.theme, closed: [...document.querySelectorAll("#timeline details:not([open])")] };
    root.dataset.theme = "light";
    aorta.printing = true;
    for (const details of before.closed) details.open = true;
    show();
  });
  addEventListener("afterprint", () => {
    aorta.printing = false;
    if (before.theme) root.dataset.theme = before.theme; else delete root.dataset.theme;
    for (const details of before.closed) details.open = false;
    show();
  });
  show();
})();

for (const table of document.querySelectorAll("table")) { // where columns do not fit, a cell says its column
  const heads = table.tHead ? [...table.tHead.rows[0].cells].map((head) => head.textContent.trim()) : [];
  for (const row of table.tBodies[0].rows) {
    if (row.cells.length === heads.length) [...row.cells].forEach((cell, i) => { if (cell.tagName === "TD" && heads[i] && !cell.dataset.label) cell.dataset.label = heads[i]; });
  }
}

(() => { // ---- tables
  const value = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.value === undefined) return cell.textContent;
    return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number"
    ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));

  function sort(table, head) {
    const column = head.cellIndex, body = table.tBodies[0];
    const ascending = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.cells) {
      if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    }
    head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const rows = [...body.rows].map((row) => [value(row, column), row]);
    rows.sort(([a], [b]) => { // what was not measured is last either way
      if (a === null || b === null) return (a === null) - (b === null);
      return ascending ? compare(a, b) : compare(b, a);
    });
    body.append(...rows.map(([, row]) => row));
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    table.tHead.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) sort(table, button.closest("th"));
    });
  }
  for (const block of document.querySelectorAll(".filterable")) {
    const input = block.querySelector("input"), rows = [...block.querySelector("tbody").rows];
    const texts = rows.map((row) => [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase());
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, i) => {
        row.hidden = !words.every((word) => texts[i].includes(word));
        shown += !row.hidden;
      });
      block.querySelector("output").textContent = `${shown} of ${rows.length} row${rows.length === 1 ? "" : "s"}`;
    });
  }
})();
