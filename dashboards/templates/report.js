// The page: controls, panels that are drawn when they come into view, CSV on demand, theme and print.

const CONFIG = {responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset", scrollZoom: false};
const panels = [];                              // {box, plot, build, height, drawn}
const sources = {};                             // figure -> () => CSV rows

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    key.startsWith("on") ? element.addEventListener(key.slice(2), value) : element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function draw(panel) {
  const built = panel.build(), height = built.height || panel.height;
  panel.plot.style.height = `${height}px`;
  built.layout.height = height;
  panel.drawn = true;
  return Plotly.react(panel.plot, built.data, built.layout, CONFIG);
}

// Panels near the screen are drawn one at a time, between frames: scrolling goes on meanwhile.
const queue = new Set();
const idle = window.requestIdleCallback || (task => setTimeout(task, 1));
function drawNext() {
  const [panel] = queue;
  if (!panel) return;
  queue.delete(panel);
  if (!panel.drawn) draw(panel);
  if (queue.size) idle(drawNext, {timeout: 200});
}
const watcher = new IntersectionObserver(entries => {
  const waiting = queue.size;
  for (const entry of entries) {
    const panel = panels.find(p => p.box === entry.target);
    if (!panel.drawn) entry.isIntersecting ? queue.add(panel) : queue.delete(panel);
  }
  if (!waiting && queue.size) idle(drawNext, {timeout: 200});
}, {root: document, rootMargin: "900px 0px"});       // the document: margins count inside a frame too

function addPanel(figure, title, height, build) {
  const plot = make("div", {class: "plot", style: `height:${height}px`});
  const box = make("div", {class: "panel"}, ...(title ? [make("h4", {}, title)] : []), plot);
  figure.querySelector(".plots").append(box);
  const panel = {figure, box, plot, build, height, drawn: false};
  panels.push(panel);
  watcher.observe(box);
  return panel;
}

const redraw = figure => panels.filter(p => p.drawn && (!figure || p.figure === figure)).forEach(draw);

function addSwitch(figure, label, options, chosen, onchange) {
  if (options.length < 2) return;
  const buttons = options.map(([key, text]) => make("button", {
    type: "button", "aria-pressed": key === chosen, "data-key": key,
    onclick: event => {
      buttons.forEach(b => b.setAttribute("aria-pressed", b === event.currentTarget));
      onchange(key);
      redraw(figure);
    },
  }, text));
  figure.querySelector(".controls").append(make("span", {class: "switch", role: "group", "aria-label": label}, ...buttons));
}

function addSelect(figure, label, options, onchange) {
  if (options.length < 2) return;
  const select = make("select", {"aria-label": label, onchange: event => { onchange(Number(event.target.value)); redraw(figure); }},
    ...options.map(([value, text]) => make("option", {value}, text)));
  figure.querySelector(".controls").append(select);
}

function swatch(algorithm) {
  const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg"), line = document.createElementNS(ns, "line");
  svg.setAttribute("viewBox", "0 0 26 8");
  for (const [k, v] of Object.entries({x1: 0, x2: 26, y1: 4, y2: 4, "stroke-width": 3})) line.setAttribute(k, v);
  line.dataset.algorithm = algorithm;
  line.setAttribute("stroke-dasharray", {solid: "none", dash: "6 3", dot: "2.5 2.5"}[D.looks[algorithm][2]]);
  svg.append(line);
  return svg;
}

function tintSwatches() {
  document.querySelectorAll("line[data-algorithm]").forEach(line => line.setAttribute("stroke", colour(line.dataset.algorithm)));
}

function addLegend(figure, algorithms) {
  const legend = make("span", {class: "legend"}, ...algorithms.map(name => make("button", {
    type: "button", "aria-pressed": "true", "data-algorithm": name, title: "show or hide in all figures",
    onclick: () => {
      hidden.has(name) ? hidden.delete(name) : hidden.add(name);
      document.querySelectorAll(".legend button").forEach(b => b.dataset.algorithm && b.setAttribute("aria-pressed", !hidden.has(b.dataset.algorithm)));
      redraw();
    },
  }, swatch(name), name)));
  figure.querySelector(".controls").append(legend);
}

const columns = (figure, count) => figure.querySelector(".plots").style.setProperty("--columns", count);

const KINDS = {
  curves(figure, options) {
    const largest = D.curves.map(c => Math.max(...finite(c.x.comm_mb), 0)).filter(v => v > 0);
    const spread = Math.max(...largest) / Math.min(...largest);
    const asked = options.ys.find(y => D.panels.some(panel => panel.target[0] === y));
    const state = {x: options.against, y: asked || options.ys[0], scale: !options.log && spread > 6 ? "log" : "linear"};
    addSwitch(figure, "horizontal axis", ["comm_mb", "seconds", "round"].map(k => [k, D.short[k]]), state.x, k => { state.x = k; });
    addSwitch(figure, "vertical axis", options.ys.map(k => [k, D.short[k]]), state.y, k => { state.y = k; });
    addSwitch(figure, "scale of the horizontal axis", [["linear", "linear"], ["log", "log"]], state.scale, k => { state.scale = k; });
    addLegend(figure, [...new Set(D.curves.map(c => c.a))]);
    const shown = D.panels.map((_, s) => s).filter(s => D.curves.some(
      c => c.s === s && options.ys.some(y => c.y[y] && (!options.log || c.y[y].v.some(v => v > 0)))));
    columns(figure, shown.length === 1 ? 1 : Math.min(3, D.columns > 1 ? D.columns : shown.length));
    for (const s of shown) addPanel(figure, D.panels.length > 1 ? D.panels[s].label : "", shown.length === 1 ? 400 : 290, () => curvePanel(s, state, options.log));
    sources[figure.id] = () => [
      ["setting", "algorithm", "variant", "seeds", "state", "round", "comm_mb", "seconds", ...options.ys.flatMap(y => [y, `${y}_low`, `${y}_high`])],
      ...D.curves.flatMap(c => c.x.round.map((round, i) => [
        D.panels[c.s].label, c.a, c.l, c.seeds, c.state, round, c.x.comm_mb[i], c.x.seconds[i],
        ...options.ys.flatMap(y => ["v", "lo", "hi"].map(k => c.y[y]?.[k]?.[i] ?? "")),
      ])),
    ];
  },
  sensitivity(figure) {
    columns(figure, Math.min(3, D.sensitivity.length));
    for (const panel of D.sensitivity) {
      const {box} = addPanel(figure, `${panel.a}: ${panel.title}`, 340, () => sensitivityPanel(panel));
      for (const [who, text] of panel.said) box.append(make("p", {class: "said"}, make("b", {}, who), text));
      box.append(make("p", {class: "said"}, make("b", {}, "Measured"), panel.measured));
    }
    sources[figure.id] = () => [
      ["algorithm", "parameter", "value", "runs", "diverged_or_failed", "reached", "final", "final_low", "final_high", "mb_to_target", "mb_low", "mb_high"],
      ...D.sensitivity.flatMap(s => s.points.map(p => [s.a, s.key, p.value, p.runs, p.bad, p.reached, ...(p.final || ["", "", ""]), ...(p.mb || ["", "", ""])])),
    ];
  },
  bars(figure, options) {
    const part = D[options.source], rows = part.who.map((_, i) => i), page = 16;
    const state = {from: 0};
    const pages = Array.from({length: Math.ceil(rows.length / page)}, (_, n) => [n, `${n * page + 1} – ${Math.min(rows.length, (n + 1) * page)} of ${rows.length}`]);
    addSelect(figure, "which rows", pages, n => { state.from = n * page; });
    const names = part.names.map((name, k) => make("button", {type: "button", disabled: ""},
      make("i", {style: `--light:${D.shades[part.names.length][k]};--dark:${D.shades[part.names.length][k]};border-radius:2px`}), name));
    figure.querySelector(".controls").append(make("span", {class: "legend"}, ...names));
    addPanel(figure, "", 46 * Math.min(page, rows.length) + 60, () => barsPanel(options.source, rows.slice(state.from, state.from + page), options.unit));
    sources[figure.id] = () => [["run", "algorithm", ...part.names], ...rows.map(i => [part.who[i], part.a[i], ...part.names.map(n => part.values[n][i])])];
  },
  heat(figure) {
    const state = {run: 0};
    addSelect(figure, "which run", D.heat.map((run, i) => [i, run.who]), i => { state.run = i; });
    addPanel(figure, "", Math.min(560, Math.max(240, 22 * Math.max(...D.heat.map(r => r.nodes.length)) + 70)), () => heatPanel(D.heat[state.run]));
    sources[figure.id] = () => {
      const run = D.heat[state.run];
      return [["run", "round", ...run.nodes.map(n => `node_${n}`)], ...run.rounds.map((r, i) => [run.who, r, ...run.z.map(row => row[i])])];
    };
  },
  topology(figure) {
    const state = {run: 0, step: D.graphs.runs[0].rounds.length - 1};
    const told = make("output", {class: "fine"}), slider = make("input", {type: "range", min: 0, "aria-label": "round", oninput: () => {
      state.step = Number(slider.value);
      tell();
      redraw(figure);
    }});
    const tell = () => { told.textContent = `round ${D.graphs.runs[state.run].rounds[state.step]}`; };
    const reset = () => { slider.max = D.graphs.runs[state.run].rounds.length - 1; slider.value = state.step = Number(slider.max); tell(); };
    addSelect(figure, "which run", D.graphs.runs.map((run, i) => [i, run.who]), i => { state.run = i; reset(); });
    figure.querySelector(".controls").append(slider, told);
    reset();
    addPanel(figure, "", 460, () => graphPanel(D.graphs.runs[state.run], state.step));
    sources[figure.id] = () => [
      ["run", "round", "node", "distance_x", "bytes_broadcast", "neighbours"],
      ...D.graphs.runs.flatMap(run => run.rounds.flatMap((round, t) => run.apart[t].map((apart, i) => [
        run.who, round, i, apart, run.bytes[t][i],
        t ? "" : D.graphs.layouts[run.layout].edges.filter(e => e.includes(i)).map(([a, b]) => a === i ? b : a).join(" "),
      ]))),
    ];
  },
};

const cell = value => {
  let text = value === null || value === undefined ? "" : String(value);
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;     // no formulas in a spreadsheet
  return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
};
// MLflow shows a page in a frame like this one, where a download is refused without a word.
const CAGED = window !== window.top && window.origin === "null";
const csv = figure => sources[figure.id]().map(row => row.map(cell).join(",")).join("\n") + "\n";

document.querySelectorAll("figure").forEach(figure => {
  KINDS[figure.dataset.kind](figure, JSON.parse(figure.dataset.options));
  const details = figure.querySelector("details.source");
  details.addEventListener("toggle", () => { if (details.open) details.querySelector("textarea").value = csv(figure); });
  const button = figure.querySelector("[data-download]");
  if (CAGED) button.textContent = `Copy ${figure.id}.csv`;
  button.addEventListener("click", () => {
    if (CAGED) {
      details.querySelector("textarea").select();
      button.textContent = document.execCommand("copy") ? `Copied ${figure.id}.csv` : "Selected below, to be copied";
      return;
    }
    const url = URL.createObjectURL(new Blob([csv(figure)], {type: "text/csv"}));
    make("a", {href: url, download: `${figure.id}.csv`}).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  });
});
tintSwatches();

function theme(name) {
  document.documentElement.dataset.theme = name;
  tintSwatches();
  redraw();
}
document.getElementById("theme").addEventListener("click", () => theme(isDark() ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", event => theme(event.matches ? "dark" : "light"));
document.querySelectorAll("nav a").forEach(link => link.addEventListener("click", event => {
  event.preventDefault();                        // a sandboxed frame has no address to change
  document.getElementById(link.getAttribute("href").slice(1)).scrollIntoView({behavior: "smooth"});
}));
document.querySelectorAll("[data-more]").forEach(button => button.addEventListener("click", () => {
  document.querySelector("table.long").classList.add("all");
  button.remove();
}));

// On paper: everything drawn, light, as wide as the page.
let before = null;
addEventListener("beforeprint", () => {
  before = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  document.documentElement.classList.add("printing");
  tintSwatches();
  panels.forEach(panel => { draw(panel); Plotly.Plots.resize(panel.plot); });
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  theme(before);
  panels.forEach(panel => Plotly.Plots.resize(panel.plot));
});
